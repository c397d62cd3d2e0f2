"""What tiers keep, as an unmodified vLLM subscriber decodes it: tokens, keys, groups and places."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

import msgspec
import torch
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, hash_block_tokens, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvconnect.config import OffloadConfig
from kvconnect.offload.scheduler.host import KeptBlocks
from kvconnect.offload.scheduler.offload_scheduler import OffloadScheduler
from kvconnect.offload.tier import HOST
from kvconnect.offload.tier_events import EventMaker, TierEvents
from kvconnect.transfer.orders import OffloadReport, OrdersDraft, Results, TierChange
from kvconnect.transfer.stack import Computed, Step
from kvconnect.vllm.events import describe, tier_events
from kvconnect.vllm.geometry import scheduler_config
from kvconnect.vllm.offload import BlockHashes, hit_requirements, kept_config
from tests.vllm_contract.test_offload_facts import NO_DRAFTS
from tests.vllm_contract.test_requests import request

HASH_TOKENS = 4
SIZES = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
# vLLM 0.30 divides no cache among context parallel ranks, and has no field for it.
NOT_SHARDED = {"dcp_sharded": False} if "dcp_sharded" in SlidingWindowSpec.__dataclass_fields__ else {}
WINDOW = {"sliding_window": 12, **NOT_SHARDED}
CACHE = KVCacheConfig(
    64,
    [],
    [
        KVCacheGroupSpec(["full"], FullAttentionSpec(block_size=8, **SIZES)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(block_size=4, **SIZES, **WINDOW)),
    ],
)


@pytest.fixture(autouse=True)
def _hashes_as_bytes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    init_none_hash(sha256)


def half_of(maker=None):
    kept = KeptBlocks(
        scheduler_config(kept_config(CACHE)).groups,
        hit_requirements(NO_DRAFTS, CACHE),
        hashes=BlockHashes(HASH_TOKENS),
        row_bytes={0: 128, 1: 64},
        clock=lambda: 1.0,
        events=TierEvents(maker) if maker else tier_events(CACHE),
    )
    return OffloadScheduler(OffloadConfig(cpu_bytes=1 << 20, disk_path="/nowhere"), kept, OrdersDraft([]))


def keep(half, made):
    """A prompt is computed, and kept in host memory and on disk. The events of that."""
    made.update_block_hashes()
    half.new_request(made)
    half.matched_tokens(made, 0)
    ids = [[*range(1, 2 + made.num_tokens // size)] for size in (8, 4)]
    half.update_after_alloc(made, ids, 0)
    half.launched(Step([Computed(made.request_id, made.num_tokens, ids)]))
    half.request_finished(made, ids)
    stores = half.build_orders().stores
    changes = tuple(TierChange("disk", each.copies.group, each.hashes[::-1]) for each in stores)
    numbers = {each.job: () for each in stores}
    report = OffloadReport(0, done=numbers, kept=tuple(numbers), changes=changes)
    half.update_results(Results(offload=(report,)))
    events = half.take_events()
    assert not any(half.state().values())
    return events


def decoded(events):
    batch = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=list(events)))
    return msgspec.msgpack.decode(batch, type=KVEventBatch).events


def hasher():
    return get_request_block_hasher(HASH_TOKENS, sha256)


def with_extras(number):
    """Every kind of thing that distinguishes equal tokens, and its tags as vLLM hashes it."""
    images = [("cat", 5, 9), ("dog", 14, 2), ("cat", 30, 11)]
    lora = LoRARequest(lora_name="tuned", lora_int_id=1, lora_path="/adapters/tuned")
    kinds = ({}, {"images": images}, {"lora_request": lora}, {"cache_salt": "mine"})
    more = kinds[number % 4] if number < 4 else {"images": images, "lora_request": lora, "cache_salt": "all"}
    return request(f"r{number}", range(100 * number, 100 * number + 43), block_hasher=hasher(), **more)


def tagged(keys):
    """As vLLM hashes what it publishes: with a name for each kind, since 0.31."""
    if keys is None:
        return None
    if not hasattr(kv_cache_utils, "to_event_extra_keys"):
        return tuple(key if isinstance(key, str) else tuple(key) for key in keys)
    names = {"tuned": ("lora", "tuned", "/adapters/tuned")}
    return tuple(
        names.get(key, ("cache_salt", key)) if isinstance(key, str) else ("mm", *key) for key in keys
    )


@pytest.mark.parametrize("number", range(5))
def test_tokens_and_keys_are_those_that_vllm_hashes(number):
    made = with_extras(number)
    events = decoded(keep(half_of(), made))
    # Blocks of one hash: of longer ones the keys are not by hash.
    told = [event for event in events if event.group_idx == 1]
    assert {event.medium for event in told} == {"CPU", "STORAGE"}
    found = set()
    for event in told:
        before = event.parent_block_hash
        for at, name in enumerate(event.block_hashes):
            tokens = event.token_ids[4 * at : 4 * at + 4]
            keys = tagged((event.extra_keys or [None] * 99)[at])
            before = hash_block_tokens(sha256, before, tokens, keys)
            assert before == name
            found.add(name)
    assert found <= set(made.block_hashes)
    assert (event.lora_name, event.lora_id) == (("tuned", 1) if number in (2, 4) else (None, None))


def test_a_window_and_a_tier_are_named():
    events = decoded(keep(half_of(), with_extras(0)))
    (host, disk) = [event for event in events if event.group_idx == 1]
    assert (host.kv_cache_spec_kind, host.kv_cache_spec_sliding_window) == ("sliding_window", 12)
    assert (host.medium, host.locality, host.ownership) == ("CPU", None, None)
    assert (disk.medium, disk.locality, disk.ownership) == ("STORAGE", "LOCAL", "disk")


def test_a_release_without_a_field_gets_events_without_it():
    old = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    stored = msgspec.defstruct("BlockStored", [(name, object) for name in old])
    removed = msgspec.defstruct("BlockRemoved", [("block_hashes", list), ("medium", str)])
    groups = [{"kv_cache_spec_kind": "full_attention"}, {}]
    events = keep(half_of(EventMaker(stored, removed, groups, describe)), with_extras(2))
    assert {type(event) for event in events} == {stored}
    assert {event.lora_name for event in events} == {"tuned"}


def test_a_session_is_named_where_vllm_has_it():
    if "session_id" not in BlockStored.__struct_fields__:
        pytest.skip("this release has no sessions")
    made = with_extras(0)
    made.session_id = "talk 7"
    assert {event.session_id for event in decoded(keep(half_of(), made))} == {"talk 7"}


def test_what_a_tier_removed_is_decoded_by_vllm():
    events = tier_events(CACHE)
    events.removed(HOST, 1, [b"h" * 16])
    (removed,) = decoded(events.take())
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([b"h" * 16], "CPU", 1)


def test_random_prompts_are_described_from_the_tier_that_they_come_back_from():
    """What comes from a disk of before a restart is described once a request wants it."""
    rng = random.Random(3)
    tokens = [rng.randrange(9) for _ in range(48)]
    made = request("first", tokens, block_hasher=hasher())
    half = half_of()
    whole, window = made.block_hashes[1::2], made.block_hashes
    changes = (TierChange("disk", 0, tuple(whole)), TierChange("disk", 1, tuple(window)))
    half.update_results(Results(offload=(OffloadReport(0, changes=changes),)))
    unknown = decoded(half.take_events())
    assert {(event.block_size, len(event.token_ids), event.medium) for event in unknown} == {
        (0, 0, "STORAGE")
    }
    half.new_request(made)
    assert half.matched_tokens(made, 0) == (None, False)
    fetches = half.build_orders().fetches
    fetched = {each.job: () for each in fetches}
    half.update_results(Results(offload=(OffloadReport(0, done=fetched),)))
    told = decoded(half.take_events())
    assert {event.medium for event in told} == {"CPU"}
    (event,) = [event for event in told if event.group_idx == 0]
    assert event.token_ids == tokens[:40]
    assert event.block_hashes == whole[:5]
