"""How Mooncake is imported, configured through its environment, and asked what it can do.

Owns the environment variables that this package sets, each only if the user did not.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvconnect.engine.base import Span
from kvconnect.errors import EngineError

NVLINK = "nvlink"
"""Between GPUs of one host. The library is told by its environment alone."""


def register_spans(engine: Any, spans: Sequence[Span]) -> int:
    """Register all spans in one call; the library's code, 0 if it was done."""
    if not spans:
        return 0
    return int(
        engine.batch_register_memory([span.address for span in spans], [span.length_bytes for span in spans])
    )


def prepare_environment(protocol: str, device_name: str, library_timeout_s: int) -> None:
    """Make the library use the protocol that was asked for, or refuse. Raises ``EngineError``."""
    if protocol == "tcp":
        if os.environ.get("MC_FORCE_HCA"):
            raise EngineError("protocol 'tcp' was asked for, but MC_FORCE_HCA forces RDMA: unset it")
        # Without it the library takes RDMA as soon as it finds an adapter.
        os.environ.setdefault("MC_FORCE_TCP", "1")
    elif protocol == "rdma":
        if os.environ.get("MC_FORCE_TCP"):
            raise EngineError(
                "protocol 'rdma' was asked for, but MC_FORCE_TCP is set, by the environment or by an "
                "engine of this process that uses 'tcp'"
            )
        _check_adapters(device_name)
    elif protocol == NVLINK:
        for name in ("MC_FORCE_TCP", "MC_FORCE_HCA", "MC_FORCE_MNNVL"):
            if os.environ.get(name):
                raise EngineError(f"protocol 'nvlink' was asked for, but {name} is set: unset it")
        if not built_for_cuda():
            raise EngineError(
                "protocol 'nvlink' needs Mooncake built with CUDA; pip install kvconnect[mooncake]"
            )
        os.environ.setdefault("MC_INTRANODE_NVLINK", "true")
    else:
        raise EngineError(f"protocol is {protocol!r}: Mooncake engines know 'tcp', 'rdma' and 'nvlink'")
    # It logs every batch at INFO, to standard error; what matters comes back as errors.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "2")
    # A transfer to a peer that hangs blocks its thread for this long; the library's default is 30.
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(max(int(library_timeout_s), 5)))


def _check_adapters(device_name: str) -> None:
    root = Path("/sys/class/infiniband")
    found = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    wanted = [name.strip() for name in device_name.split(",") if name.strip()]
    missing = [name for name in wanted if name not in found]
    if not found or missing:
        raise EngineError(
            f"protocol 'rdma' needs adapters {missing or '(any)'}, this host has {found or 'none'}: "
            "use protocol 'tcp', or name one of these in device_name"
        )


def load_library() -> Any:
    """Import the extension module. Raises ``EngineError`` that says what to install."""
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise EngineError(
            f"Mooncake is not usable ({error}); pip install kvconnect[mooncake-cpu] (or "
            "kvconnect[mooncake] with CUDA) and apt-get install libibverbs1"
        ) from error


def built_for_cuda() -> bool:
    """Whether the wheel that is installed was built with CUDA; the module itself does not say."""
    for name in ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False
