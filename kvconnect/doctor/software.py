"""What is installed: Python, torch, the engines, vLLM. Pure: facts in, findings out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import entry_points

from kvconnect import __version__
from kvconnect.doctor.facts import Facts
from kvconnect.doctor.findings import Finding, failure, warning, well
from kvconnect.doctor.trial import Trial
from kvconnect.vllm.versions import NEWEST, OLDEST


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
    if machine.has_nvidia_driver and not machine.gpus:
        yield warning(
            "torch",
            f"{version} sees no GPU, though the NVIDIA driver is loaded",
            "install a CUDA build of torch; look at CUDA_VISIBLE_DEVICES; give a container its GPUs",
        )
    else:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus))
        yield well("torch", f"{version}, {len(machine.gpus)} x {names}" if names else f"{version}, no GPU")
    triton = machine.versions.get("triton", "")
    if not machine.gpus:
        yield well("Triton", f"{triton or 'not installed'}; without a GPU numpy packs pages")
    elif not triton:
        yield failure("Triton", "it is not installed, and packs pages on GPUs", "pip install triton")
    elif not machine.compiler:
        yield failure(
            "Triton",
            f"{triton} finds no C compiler, which it needs at its first use",
            "apt-get install gcc, or set CC",
        )
    else:
        yield well("Triton", f"{triton}, compiler {machine.compiler}")


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
    return (
        f"pip install 'kvconnect[{name}]', or another engine"
        if name in ("nixl", "mooncake")
        else "install it"
    )


def _tried(facts: Facts, name: str, trial: Trial) -> Finding:
    is_ours = name == facts.engine
    about = f"engine {name}"
    if not trial.error:
        shown = f"{trial.engine} {facts.machine.versions.get(trial.engine, '')}".strip()
        wire = f", a write went over {trial.wire}" if trial.wire else ""
        return well(about, f"{shown}: {trial.lane}{wire}{'' if is_ours else ' (not used)'}")
    if not is_ours:
        return warning(about, f"not used, and does not start: {trial.error}", "nothing, unless you mean it")
    return failure(about, trial.error, _advice(facts))


def _advice(facts: Facts) -> str:
    extra = facts.extra
    adapters = [f"{port.device}:{port.port}" for port in facts.machine.rdma]
    has = f"RDMA {', '.join(adapters) or 'none'}; interfaces {', '.join(facts.interfaces)}"
    accepted = "protocol takes auto, and a backend of NIXL (UCX) or tcp, rdma, nvlink of Mooncake"
    if extra.device_name and extra.protocol == "auto":
        accepted = "device_name has to be one of these, or empty"
    elif extra.protocol == "auto":
        accepted = "look at the UCX_ and MC_ variables, and at host"
    return f"this machine has {has}; {accepted}"


def _vllm(facts: Facts) -> Iterator[Finding]:
    version, environ = facts.machine.versions.get("vllm", ""), facts.machine.environ
    if not version:
        yield well("vLLM", "not installed; the reference node (kvconnect serve) needs none")
        return
    found = re.match(r"(\d+)\.(\d+)", version)
    accepted = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        yield warning("vLLM", f"{version} is none of those that were tested", f"install vLLM {accepted}")
    else:
        runner = environ.get("VLLM_USE_V2_MODEL_RUNNER")
        shown = {None: "vLLM's own choice", "0": "the first", "1": "V2"}.get(runner, str(runner))
        yield well("vLLM", f"{version}, tested; model runner: {shown}")
    named = facts.config is not None and facts.config.kv_connector_module_path is not None
    plugins = environ.get("VLLM_PLUGINS")
    has_plugin = any(entry.name == "kvconnect" for entry in entry_points(group="vllm.general_plugins"))
    if not named and (not has_plugin or (plugins is not None and "kvconnect" not in plugins.split(","))):
        why = f"VLLM_PLUGINS is {plugins!r}" if has_plugin else "its plugin is not installed"
        yield failure(
            "vLLM plugin",
            f"vLLM does not find the name KVConnect: {why}",
            'set "kv_connector_module_path": "kvconnect.vllm"',
        )
