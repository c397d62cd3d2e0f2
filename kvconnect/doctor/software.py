"""What is installed: Python, torch, the engines, vLLM. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

from kvconnect import __version__
from kvconnect.doctor.facts import Facts
from kvconnect.doctor.findings import Finding, failure, failure_if, warning, warning_if, well
from kvconnect.doctor.trial import Trial
from kvconnect.vllm.versions import RANGE, is_tested


def check_software(facts: Facts) -> Iterator[Finding]:
    """Packages, engines and the serving stack."""
    versions = facts.machine.versions
    yield well("Python", f"{versions.get('python', '?')}, kvconnect {__version__}")
    yield from _torch(facts)
    yield from _engines(facts)
    yield from _vllm(facts)


def _torch(facts: Facts) -> Iterator[Finding]:
    machine, version = facts.machine, facts.machine.versions.get("torch", "")
    if not version:
        yield failure("torch", "it is not installed", "pip install torch, the build for this machine")
        return
    names = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus))
    found = f"{version}, {len(machine.gpus)} x {names}" if names else f"{version}, no GPU"
    hidden = machine.has_nvidia_driver and not machine.gpus
    yield warning_if(
        hidden,
        "torch",
        f"{found}, though the NVIDIA driver is loaded" if hidden else found,
        "install a CUDA build of torch; look at CUDA_VISIBLE_DEVICES; give a container its GPUs",
    )
    triton = machine.versions.get("triton", "")
    if not machine.gpus:
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
        yield failure("engine auto", f"none works here: {reasons}", _install("nixl"))
    elif configured == "auto":
        yield well("engine auto", f"takes {facts.engine}")
    for name, problem in facts.engines.items():
        if problem and name == configured:
            yield failure(f"engine {name}", f"it does not work here: {problem}", _install(name))
        elif problem:
            yield well(f"engine {name}", f"not used, and not usable: {problem}")
    for name, trial in facts.trials.items():
        yield _tried(facts, name, trial)


def _install(name: str) -> str:
    ours = name in ("nixl", "mooncake")
    return f"pip install 'kvconnect[{name}]', or another engine" if ours else "install it"


def _tried(facts: Facts, name: str, trial: Trial) -> Finding:
    is_ours, about = name == facts.engine, f"engine {name}"
    if not trial.error:
        shown = f"{trial.engine} {facts.machine.versions.get(trial.engine, '')}".strip()
        wire = f", a write went over {trial.wire}" if trial.wire else ""
        return well(about, f"{shown}: {trial.lane}{wire}{'' if is_ours else ' (not used)'}")
    if not is_ours:
        return warning(about, f"not used, and does not start: {trial.error}", "nothing, unless you mean it")
    adapters = ", ".join(f"{port.device}:{port.port}" for port in facts.machine.rdma)
    accepted = "protocol takes auto, and a backend of NIXL (UCX) or tcp, rdma, nvlink of Mooncake"
    if facts.extra.protocol == "auto":
        accepted = "look at the UCX_ and MC_ variables, and at host"
        if facts.extra.device_name:
            accepted = "device_name has to be one of these, or empty"
    has = f"RDMA {adapters or 'none'}; interfaces {', '.join(facts.interfaces)}"
    return failure(about, trial.error, f"this machine has {has}; {accepted}")


def _vllm(facts: Facts) -> Iterator[Finding]:
    version, environ = facts.machine.versions.get("vllm", ""), facts.machine.environ
    if not version:
        yield well("vLLM", "not installed; the reference node (kvconnect serve) needs none")
        return
    runner = environ.get("VLLM_USE_V2_MODEL_RUNNER")
    shown = {None: "vLLM's own choice", "0": "the first", "1": "V2"}.get(runner, str(runner))
    tested = is_tested(version)
    found = f"{version}, {'tested' if tested else 'not tested'}; model runner: {shown}"
    yield warning_if(not tested, "vLLM", found, f"install vLLM {RANGE}")
    named = facts.config is not None and facts.config.kv_connector_module_path is not None
    plugins = environ.get("VLLM_PLUGINS")
    has_plugin = any(entry.name == "kvconnect" for entry in entry_points(group="vllm.general_plugins"))
    if not named and (not has_plugin or (plugins is not None and "kvconnect" not in plugins.split(","))):
        why = f"VLLM_PLUGINS is {plugins!r}" if has_plugin else "its plugin is not installed"
        advice = 'set "kv_connector_module_path": "kvconnect.vllm"'
        yield failure("vLLM plugin", f"vLLM does not find the name KVConnect: {why}", advice)
