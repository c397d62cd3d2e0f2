"""Networks, GPUs and the limits of a process. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator

from kvconnect.addresses import is_loopback
from kvconnect.doctor.facts import Facts
from kvconnect.doctor.findings import Finding, failure, warning, well
from kvconnect.engine.fabric import ACTIVE

_RDMA_TRANSPORTS = ("rc", "ud", "dc", "ib", "gga", "srd")
_LEAST_LOCKED, _WANTED_LOCKED = 64 << 20, 1 << 30
_LEAST_SHM = 256 << 20
_LEAST_FILES = 4096
_UNLIMITED = (
    "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; Docker: --ulimit memlock=-1; "
    "Kubernetes: the capability IPC_LOCK"
)


def check_hardware(facts: Facts) -> Iterator[Finding]:
    """Devices, what joins them, and the limits of this process."""
    yield from _rdma(facts)
    yield from _transport(facts)
    yield from _gpus(facts)
    yield from _variables(facts)
    yield from _limits(facts)


def asks_rdma(facts: Facts) -> str:
    """What of the settings or the environment means RDMA; empty for nothing."""
    extra, environ = facts.extra, facts.machine.environ
    if extra.protocol == "rdma":
        return "protocol 'rdma'"
    if any(name not in facts.interfaces for name in _adapters(extra.device_name)):
        return f"device_name {extra.device_name!r}"
    devices = environ.get("UCX_NET_DEVICES", "all")
    if devices != "all" and any(name not in facts.interfaces for name in _adapters(devices)):
        return f"UCX_NET_DEVICES={devices}"
    return "MC_FORCE_HCA" if environ.get("MC_FORCE_HCA") else ""


def _adapters(names: str) -> list[str]:
    return [name.strip().partition(":")[0] for name in names.split(",") if name.strip()]


def _rdma(facts: Facts) -> Iterator[Finding]:
    ports, asked = facts.machine.rdma, asks_rdma(facts)
    if not ports:
        if asked:
            yield failure(
                "RDMA",
                f"{asked} asks for it, and this machine has no RDMA device",
                "load its driver, give a container its devices, or set protocol to tcp (Mooncake) or auto",
            )
        else:
            yield well("RDMA", "no device; between machines bytes go over TCP")
        return
    named = [name for name in _adapters(facts.extra.device_name) if name not in facts.interfaces]
    missing = [name for name in named if all(port.device != name for port in ports)]
    if missing:
        yield failure(
            "RDMA",
            f"device_name names {', '.join(missing)}, which this machine does not have",
            f"accepted: {', '.join(dict.fromkeys(port.device for port in ports))}",
        )
    for port in ports:
        about, found = f"RDMA {port.device}:{port.port}", f"{port.state}, {port.rate}, {port.link_layer}"
        if port.state == ACTIVE:
            yield well(about, f"{found}, NUMA node {port.numa_node}")
        elif port.device in named:
            yield failure(
                about, f"device_name asks for it: {found}", "look at the cable, the switch and its subnet"
            )
        else:
            yield warning(about, found, "look at the cable and the switch, or name others in device_name")
    if not facts.machine.has_verbs:
        yield failure(
            "RDMA",
            "/dev/infiniband has no uverbs device",
            "Docker: --device /dev/infiniband; Kubernetes: rdma/...",
        )


def _transport(facts: Facts) -> Iterator[Finding]:
    """What the configured engine carried its bytes over, beside what was asked for."""
    trial, asked = facts.trials.get(facts.engine), asks_rdma(facts)
    if trial is None or trial.error:
        return
    used = trial.wire or trial.lane
    if "tcp" not in used.lower():
        return
    active = facts.machine.active_ports
    if asked:
        yield failure("transport", f"{asked} asks for RDMA, and bytes go over {used}", _tcp_advice(facts))
    elif active and not is_loopback(facts.extra.host):
        yield warning(
            "transport",
            f"bytes to other hosts go over {used}, though {active[0].device} is there",
            f"device_name {active[0].device}{'' if trial.engine == 'mooncake' else f':{active[0].port}'}; "
            + _tcp_advice(facts),
        )


def _tcp_advice(facts: Facts) -> str:
    environ = facts.machine.environ
    forced = [name for name in ("MC_FORCE_TCP", "UCX_TLS", "UCX_NET_DEVICES") if environ.get(name)]
    return f"unset {', '.join(forced)}" if forced else "no variable forces TCP: look at the RDMA rows"


def _gpus(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if not machine.gpus:
        return
    if machine.rdma:
        if machine.has_peermem or all(gpu.has_dmabuf for gpu in machine.gpus):
            how = "nvidia_peermem" if machine.has_peermem else "DMA-BUF"
            yield well("GPUDirect", f"RDMA devices reach GPU memory by {how}")
        else:
            yield warning(
                "GPUDirect",
                "neither nvidia_peermem nor DMA-BUF: bytes go through host memory",
                "modprobe nvidia_peermem, or a driver and kernel (5.12) with DMA-BUF",
            )
        nodes = {port.numa_node for port in facts.machine.active_ports}
        far = [gpu.index for gpu in machine.gpus if gpu.numa_node not in nodes | {-1}]
        if far and nodes - {-1}:
            yield warning(
                "NUMA",
                f"GPUs {far} are on other nodes than every active RDMA device",
                "place servers on GPUs beside a device, and name that in device_name",
            )
    if len(machine.gpus) > 1:
        kinds = sorted(set(machine.links.values()))
        alone = [gpu.index for gpu in machine.gpus if not gpu.peers]
        found = f"links {', '.join(kinds)}" if kinds else "peer access"
        if alone:
            yield warning(
                "GPU links", f"GPUs {alone} reach no other GPU's memory ({found})", "nvidia-smi topo -p2p r"
            )
        else:
            yield well("GPU links", f"{found}: each GPU reaches others' memory")


def _variables(facts: Facts) -> Iterator[Finding]:
    environ, has_gpus = facts.machine.environ, bool(facts.machine.gpus)
    shown = [f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith(("UCX_", "MC_"))]
    yield well("variables", ", ".join(shown) or "no UCX_ or MC_ variable is set")
    transports = environ.get("UCX_TLS", "all")
    listed = [name.strip() for name in transports.split(",")]
    if has_gpus and transports != "all" and not transports.startswith("^") and not _has(listed, "cuda"):
        yield failure(
            "UCX_TLS", f"{transports} has nothing for GPU memory", "add cuda_copy,cuda_ipc, or unset UCX_TLS"
        )
    has_rdma = transports == "all" or transports.startswith("^")
    if asks_rdma(facts) and not has_rdma and not any(_has(listed, kind) for kind in _RDMA_TRANSPORTS):
        yield failure("UCX_TLS", f"{transports} has no RDMA, which is asked for", "add rc, or unset UCX_TLS")
    allocator = environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + environ.get("PYTORCH_ALLOC_CONF", "")
    if has_gpus and "expandable_segments:True" in allocator:
        yield warning(
            "allocator",
            "expandable_segments is on: memory cannot be shared over NVLink by Mooncake, nor by CUDA IPC",
            "take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF",
        )


def _has(listed: list[str], kind: str) -> bool:
    return any(name == kind or name.startswith((f"{kind}_", f"{kind}x")) for name in listed)


def _limits(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    locked = machine.memlock_bytes
    found = "unlimited" if locked is None else f"{locked >> 10} KiB"
    needs = bool(machine.rdma or asks_rdma(facts))
    if locked is None or machine.may_lock or locked >= _WANTED_LOCKED:
        yield well(
            "memlock", found + (", and this process may exceed it" if locked and machine.may_lock else "")
        )
    elif needs and locked < _LEAST_LOCKED:
        yield failure("memlock", f"{found}: RDMA devices cannot register memory", _UNLIMITED)
    elif needs or locked < 1 << 20:
        yield warning("memlock", f"{found}: RDMA would need more", _UNLIMITED)
    else:
        yield well("memlock", f"{found}, enough without RDMA")
    if machine.open_files is not None and machine.open_files < _LEAST_FILES:
        yield warning(
            "open files",
            f"{machine.open_files}: each peer takes several",
            f"ulimit -n {4 * _LEAST_FILES}; systemd: LimitNOFILE",
        )
    else:
        yield well("open files", str(machine.open_files or "unlimited"))
    if machine.shm_free_bytes < _LEAST_SHM:
        yield warning(
            "/dev/shm",
            f"{machine.shm_free_bytes >> 20} MiB are free of {machine.shm_bytes >> 20}",
            "Docker: --shm-size 8g; Kubernetes: an emptyDir of medium Memory at /dev/shm",
        )
    else:
        yield well("/dev/shm", f"{machine.shm_free_bytes >> 20} MiB free")
