"""Which engines exist, which of them work here, and how to make one by name.

Owns the names and the advice on what to install. Libraries are imported only when they are asked
for, so importing this module costs nothing and fails never.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from kvconnect.engine.base import Engine
from kvconnect.errors import ConfigError, EngineError

log = logging.getLogger("kvconnect.engine")

# The order in which ``auto`` tries them. The memory engine comes last: it is for tests. NVLink reaches one
# host only, so it is never chosen alone, but it is joined to what is chosen.
_PREFERENCE = ("nixl", "mooncake", "memory")


_told: list[str] = []
"""What was said once in this process, and need not be said again."""

# What an engine's class is given otherwise, and what is there for its tests.
_NO_OPTIONS = {"host", "protocol", "backend", "memory", "make_copier"}


def create_engine(
    name: str, *, host: str, protocol: str = "", options: Mapping[str, Any] | None = None
) -> Engine:
    """Make an engine.

    Args:
        name: ``"nixl"``, ``"mooncake"``, ``"memory"``, ``"nvlink"`` or ``"auto"``. That takes the first of
            the first three that works here, joins NVLink to it where there are GPUs, and logs both.
        host: the address at which peers reach this node.
        protocol: for Mooncake ``"tcp"`` or ``"rdma"``, for NIXL the backend; empty for the default.
        options: further arguments of the engine's class. With ``"auto"``, ``nvlink`` holds those of the
            NVLink engine, or False to do without it.

    Raises:
        ConfigError: no engine has this name, or it does not take an option.
        EngineError: the engine does not work here; the text says what to install.
    """
    options = dict(options or {})
    if name == "auto":
        for_nvlink = options.pop("nvlink", {})
        return _with_nvlink(_create(_choose(), host, protocol, options), for_nvlink)
    return _create(name, host, protocol, options)


def available_engines() -> dict[str, str]:
    """Every engine by name: empty if it is usable here, else why it is not and what to install."""
    return {name: problem() for name, problem in _PROBLEM.items()}


def _create(name: str, host: str, protocol: str, options: dict[str, Any]) -> Engine:
    if name not in _MAKERS:
        raise ConfigError(f"engine is {name!r}: one of nvlink, {', '.join(_PREFERENCE)} or auto is known")
    problem = _PROBLEM[name]()
    if problem:
        raise EngineError(f"engine {name!r} does not work here: {problem}")
    return _MAKERS[name](host, protocol, options)


def _with_nvlink(network: Engine, options: object) -> Engine:
    """Join the NVLink engine to what ``auto`` has chosen, if there is one and it moves GPU memory."""
    if options is False or available_engines().get("nvlink") != "" or not network.capabilities.device_memory:
        return network
    from kvconnect.engine.paired import PairedEngine

    try:
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"engine_options.nvlink is {options!r}, accepted: an object of options, or false"
            )
        joined = PairedEngine(network, _create("nvlink", "", "", dict(options)))
    except (ConfigError, EngineError):
        network.close()
        raise
    log.info("engine auto joins 'nvlink' to %r for GPUs of this host", network.capabilities.name)
    return joined


def _choose() -> str:
    problems = {name: _PROBLEM[name]() for name in _PREFERENCE}
    chosen = next(name for name in _PREFERENCE if not problems[name])
    skipped = "; ".join(f"{name}: {why}" for name, why in problems.items() if why)
    if chosen == "memory":
        log.warning(
            "engine auto found no transfer library and uses 'memory', which is made for tests (%s)",
            skipped,
        )
    else:
        log.info("engine auto uses %r%s", chosen, f" ({skipped})" if skipped else "")
    return chosen


def _check_options(kind: Callable[..., Any], options: dict[str, Any]) -> None:
    known = set(inspect.signature(kind).parameters) - _NO_OPTIONS
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"unknown engine options {unknown}: {sorted(known)} are known")


def _make_memory(host: str, protocol: str, options: dict[str, Any]) -> Engine:
    from kvconnect.engine.memory import MemoryEngine

    if protocol not in ("", "tcp"):
        raise ConfigError(f"protocol is {protocol!r}: the memory engine only knows 'tcp'")
    _check_options(MemoryEngine, options)
    return cast(Engine, MemoryEngine(host, **options))


def _make_mooncake(host: str, protocol: str, options: dict[str, Any]) -> Engine:
    from kvconnect.engine.mooncake import MooncakeEngine

    _check_options(MooncakeEngine, options)
    if not _told:
        _told.append("mooncake")
        log.warning(
            "Mooncake listens on all interfaces, whatever host is, and asks nobody who they are: close its "
            "ports (15000 to 17000) to all but peers"
        )
    return cast(Engine, MooncakeEngine(host, protocol or "tcp", **options))


def _make_nixl(host: str, protocol: str, options: dict[str, Any]) -> Engine:
    from kvconnect.engine.interfaces import ucx_options
    from kvconnect.engine.nixl import NixlEngine

    device_name = options.pop("device_name", "")
    _check_options(NixlEngine, options)
    if protocol in ("", "UCX"):
        options["backend_options"] = ucx_options(host, device_name, options.get("backend_options") or {})
    elif device_name:
        raise ConfigError(f"device_name is {device_name!r}: NIXL's backend {protocol} takes none here")
    return cast(Engine, NixlEngine(protocol or "UCX", **options))


def _make_nvlink(host: str, protocol: str, options: dict[str, Any]) -> Engine:
    from kvconnect.engine.nvlink import NvlinkEngine

    if protocol:
        raise ConfigError(f"protocol is {protocol!r}: the NVLink engine has none, leave it at 'auto'")
    _check_options(NvlinkEngine, options)
    return cast(Engine, NvlinkEngine(**options))


def _memory_problem() -> str:
    return ""


def _mooncake_problem() -> str:
    if not _installed("mooncake"):
        return (
            "the package mooncake is not installed; pip install kvconnect[mooncake-cpu], "
            "or kvconnect[mooncake] on a machine with CUDA"
        )
    try:
        # What its extension links to, asked for first because the import error names only the file.
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "libibverbs.so.1 is missing; apt-get install libibverbs1"
    return _import_problem("mooncake.engine", "kvconnect[mooncake-cpu]")


def _nixl_problem() -> str:
    if not _installed("nixl"):
        return "the package nixl is not installed; pip install kvconnect[nixl]"
    try:
        from kvconnect.engine.nixl_library import load_library

        load_library()
    except EngineError as error:
        return str(error)
    return ""


def _nvlink_problem() -> str:
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU on this machine"
    if not _installed("triton"):
        return "the package triton is not installed; pip install triton"
    try:
        from kvconnect.engine.ipc import peer_access_problem

        return peer_access_problem()
    except EngineError as error:
        return str(error)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _import_problem(module: str, extra: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        if "cudart" in str(error):
            return f"{error}; pip install kvconnect[mooncake-cpu] instead of the CUDA build"
        return f"{error}; pip install {extra}"
    return ""


_MAKERS: dict[str, Callable[[str, str, dict[str, Any]], Engine]] = {
    "memory": _make_memory,
    "mooncake": _make_mooncake,
    "nixl": _make_nixl,
    "nvlink": _make_nvlink,
}
_PROBLEM: dict[str, Callable[[], str]] = {
    "memory": _memory_problem,
    "mooncake": _mooncake_problem,
    "nixl": _nixl_problem,
    "nvlink": _nvlink_problem,
}
