"""KV events of the tiers as vLLM's own event classes, with the tokens and keys that vLLM hashes.

The fields of an event differ by release: they are read from vLLM's classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvconnect.offload.tier_events import Described, EventMaker, TierEvents

if TYPE_CHECKING:
    from vllm.v1.request import Request

# vLLM before 0.31 hashes keys as it publishes them.
_PUBLISHED = getattr(kv_cache_utils, "to_event_extra_keys", list)


def tier_events(kv_cache_config: Any) -> TierEvents:
    """The event log of the tiers, which makes events of the installed vLLM release."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    groups = [
        {
            "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
            "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
        }
        for spec in specs
    ]
    # vLLM reads its setting of this per hash, for 4 us.
    name = _last_64_bits if envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES else bytes
    return TierEvents(EventMaker(BlockStored, BlockRemoved, groups, describe, name))


def _last_64_bits(name: bytes) -> int:
    """A hash in vLLM's default published form."""
    return int.from_bytes(name[-8:], "big")


def describe(request: Request, first: int, count: int, block_tokens: int) -> Described:
    """The fields that vLLM would publish for device blocks ``first`` to ``first + count`` of a request."""
    start, end = first * block_tokens, (first + count) * block_tokens
    described: dict[str, Any] = {"token_ids": request.all_token_ids[start:end]}
    lora = request.lora_request
    if lora or request.mm_features or request.cache_salt or request.prompt_embeds is not None:
        every, feature = [], 0
        for at in range(start, end, block_tokens):
            own, feature = generate_block_hash_extra_keys(request, at, at + block_tokens, feature)
            every.append(own)
        described["extra_keys"] = _PUBLISHED(every)
    if lora:
        described |= {"lora_id": lora.adapter_id, "lora_name": lora.lora_name}
    if session_id := getattr(request, "session_id", None):
        described["session_id"] = session_id
    return described
