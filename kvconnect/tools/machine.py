"""Facts of this machine that KV transfers depend on. Collects only; judges nothing.

Everything below ``/sys``, ``/proc`` and ``/dev`` is read under a root that is an argument.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvconnect.engine.cuda_driver import supports_dmabuf
from kvconnect.engine.lanes import Fabric, look_at_fabric, read_text
from kvconnect.packages import find_compiler, package_versions

VARIABLES = ("UCX_", "MC_", "NIXL_", "VLLM_", "PYTORCH_", "CUDA_VISIBLE_DEVICES")
"""Prefixes of environment variables that libraries read."""
_CAP_IPC_LOCK = 14


@dataclass(frozen=True, kw_only=True)
class Machine(Fabric):
    """The facts. Limits are in bytes or counts; None: unlimited.

    ``visible_gpus``: how many GPUs torch sees; ``has_dmabuf``: RDMA reaches them without a kernel module.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    has_verbs: bool = True
    has_peermem: bool = False
    visible_gpus: int = 0
    has_dmabuf: bool = False
    compiler: str = ""
    memlock_bytes: int | None = None
    may_lock: bool = False
    open_files: int | None = None
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)


def look(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """Collect the facts. A source that cannot be read leaves its default."""
    shm = os.statvfs(root / "dev/shm") if (root / "dev/shm").is_dir() else None
    memlock, files = (
        resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
    )
    capabilities = re.search(r"^CapEff:\s*(\w+)$", read_text(root / "proc/self/status"), re.M)
    visible_gpus = _visible_gpus()
    return Machine(
        **vars(look_at_fabric(root, with_gpus=True)),
        versions=package_versions(),
        has_verbs=any((root / "dev/infiniband").glob("uverbs*")),
        has_peermem="nvidia_peermem" in read_text(root / "proc/modules"),
        visible_gpus=visible_gpus,
        has_dmabuf=visible_gpus > 0 and supports_dmabuf(),
        compiler=find_compiler(environ),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        may_lock=capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1),
        open_files=None if files == resource.RLIM_INFINITY else files,
        shm_bytes=shm.f_frsize * shm.f_blocks if shm else 0,
        shm_free_bytes=shm.f_frsize * shm.f_bavail if shm else 0,
        # Other variables may hold secrets.
        environ={name: value for name, value in environ.items() if name.startswith(VARIABLES)},
    )


def _visible_gpus() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()
