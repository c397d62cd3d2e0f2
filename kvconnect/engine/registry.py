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

# The order in which ``auto`` tries them. The memory engine comes last: it is for tests.
_PREFERENCE = ("nixl", "mooncake", "memory")


def create_engine(
    name: str, *, host: str, protocol: str = "", options: Mapping[str, Any] | None = None
) -> Engine:
    """Make an engine.

    Args:
        name: ``"nixl"``, ``"mooncake"``, ``"memory"`` or ``"auto"``, which takes the first of these
            that works here and logs which.
        host: the address at which peers reach this node.
        protocol: for Mooncake ``"tcp"`` or ``"rdma"``, for NIXL the backend; empty for the default.
        options: further arguments of the engine's class.

    Raises:
        ConfigError: no engine has this name, or it does not take an option.
        EngineError: the engine does not work here; the text says what to install.
    """
    chosen = _choose() if name == "auto" else name
    if chosen not in _MAKERS:
        raise ConfigError(f"engine is {name!r}: one of {', '.join(_PREFERENCE)} or auto is known")
    problem = _PROBLEM[chosen]()
    if problem:
        raise EngineError(f"engine {chosen!r} does not work here: {problem}")
    return _MAKERS[chosen](host, protocol, dict(options or {}))


def available_engines() -> dict[str, str]:
    """Every engine by name: empty if it is usable here, else why it is not and what to install."""
    return {name: _PROBLEM[name]() for name in _PREFERENCE}


def _choose() -> str:
    problems = available_engines()
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
    known = set(inspect.signature(kind).parameters) - {"host", "protocol", "backend"}
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
    return cast(Engine, MooncakeEngine(host, protocol or "tcp", **options))


def _make_nixl(host: str, protocol: str, options: dict[str, Any]) -> Engine:
    from kvconnect.engine.nixl import NixlEngine

    _check_options(NixlEngine, options)
    return cast(Engine, NixlEngine(protocol or "UCX", **options))


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
}
_PROBLEM: dict[str, Callable[[], str]] = {
    "memory": _memory_problem,
    "mooncake": _mooncake_problem,
    "nixl": _nixl_problem,
}
