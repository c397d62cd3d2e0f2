"""SGLang's own transfer backends on a CPU, to compare with: both take the KV pool for memory of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

ENVIRONMENT = {"nixl": {}, "mooncake": {"MC_FORCE_TCP": "1"}}
"""What each needs in its environment."""


def fit_to_cpu(backend: str) -> None:
    """Change what would end a server: at registration (nixl), with the first chunk (mooncake)."""
    if backend == "nixl":
        from nixl._api import nixl_agent

        for name in ("register_memory", "get_xfer_descs", "prep_xfer_dlist"):
            setattr(nixl_agent, name, _in_host_memory(getattr(nixl_agent, name)))
    elif backend == "mooncake":
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        # Page ids as numpy arrays instead of pinned tensors with an event of CUDA.
        MooncakeKVSender.supports_host_tensor_indices = False


def _in_host_memory(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def changed(*given: Any, **more: Any) -> Any:
        return call(*("DRAM" if isinstance(one, str) and one == "VRAM" else one for one in given), **more)

    return changed
