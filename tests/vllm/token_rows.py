"""The observing connector, and attention that keeps a row of each token, as GPUs' kernels do.

Loaded by vLLM servers under test as ``kv_connector_module_path``. The CPU build's own kernel keeps the
transposed K of a whole block, so that caches of unlike blocks cannot be lined up. This one is torch's, over
kernel blocks of 16 tokens, of which a block may have several.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from tests.vllm import observed

KVConnect = observed.KVConnect
KERNEL_BLOCK = 16


class TokenRows(CPUAttentionBackendImpl):
    """Causal attention, sequence by sequence."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        blocks, places = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
        kv_cache[blocks, :, places] = torch.cat((key, value), dim=-1)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **unused: Any,
    ) -> torch.Tensor:
        if attn_metadata is None:
            # A forward that warms up.
            return output
        starts = attn_metadata.query_start_loc.tolist()
        into = output.view(-1, self.num_heads, self.head_size)
        for number, length in enumerate(attn_metadata.seq_lens.tolist()):
            asked = slice(starts[number], starts[number + 1])
            blocks = attn_metadata.block_table[number, : -(-length // kv_cache.shape[2])]
            rows = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
            positions = torch.arange(length)
            made = torch.nn.functional.scaled_dot_product_attention(
                query[asked].transpose(0, 1),
                rows[..., : self.head_size],
                rows[..., self.head_size :],
                attn_mask=positions <= positions[length - (asked.stop - asked.start) :, None],
                scale=self.scale,
                enable_gqa=True,
            )
            into[asked] = made.transpose(0, 1)
        return output


@register_backend(AttentionBackendEnum.CUSTOM)
class TokenRowsBackend(CPUAttentionBackend):
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [KERNEL_BLOCK]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return TokenRows


CpuPlatform.get_attn_backend_cls = classmethod(  # type: ignore[method-assign,assignment]
    lambda cls, *given, **more: AttentionBackendEnum.CUSTOM.get_path()
)
