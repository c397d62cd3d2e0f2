"""Slots take what a GPU has to spare, and say so."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.config import parse_kv_transfer_config
from kvconnect.engine.memory import MemoryEngine
from kvconnect.errors import ConfigError
from kvconnect.halves.rank_traits import RankTraits, SentCache
from kvconnect.halves.worker_half import TransferWorker
from kvconnect.offload.copies.copier import fitted_staging
from kvconnect.pack.arena import (
    ALIGN_BYTES,
    LEAST_SLOT_BYTES,
    LEAST_SLOTS,
    Arena,
    fitted_slots,
    spare_bytes,
)
from kvconnect.peer.messages import CacheMeaning
from kvconnect.transfer import local
from kvconnect.transfer.stack import RankCache
from tests.identities import named

GIB = 1 << 30
MIB = 1 << 20
H200_BYTES = 143_771 * MIB
SIZES = st.integers(1, 1 << 18).map(lambda units: units * ALIGN_BYTES)


def taken(slot_bytes, count, arenas, scratch_slots=1):
    """What the arenas allocate, with scratch memory of one slot in the first, and of one for coding."""
    return (arenas * count + scratch_slots) * slot_bytes + arenas * ALIGN_BYTES


@given(SIZES, st.integers(1, 64), st.integers(1, 2), st.integers(0, 64 * GIB), st.integers(1, 2))
def test_slots_fit_into_what_is_spare_or_are_the_least(slot_bytes, count, arenas, spare, scratch):
    size, number = fitted_slots(slot_bytes, count, arenas, spare, scratch)
    least = min(slot_bytes, LEAST_SLOT_BYTES), min(count, LEAST_SLOTS)
    assert size % ALIGN_BYTES == 0
    assert least[0] <= size <= slot_bytes
    assert least[1] <= number <= count
    assert taken(size, number, arenas, scratch) <= spare or (size, number) == least
    # Fewer slots come first, and no more is given up than has to be.
    assert size == slot_bytes or number == least[1]
    if taken(slot_bytes, count, arenas, scratch) <= spare:
        assert (size, number) == (slot_bytes, count)
    elif size == slot_bytes and number < count:
        assert taken(size, number + 1, arenas, scratch) > spare
    elif size < slot_bytes:
        assert taken(size + ALIGN_BYTES, number, arenas, scratch) > spare


@pytest.mark.parametrize("utilization", [0.9, 0.95, 0.97, 0.98, 0.99])
def test_an_h200_that_is_both_keeps_what_vllm_was_promised(monkeypatch, utilization):
    before_bytes, promised_bytes = 600 * MIB, 5 * GIB
    cache_bytes = int(H200_BYTES * utilization) - promised_bytes
    free_bytes = H200_BYTES - before_bytes - cache_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, H200_BYTES))
    spare = spare_bytes(torch.device("cuda", 0), promised_bytes)
    size, number = fitted_slots(256 * MIB, 8, 2, spare)
    assert taken(size, number, 2) + promised_bytes <= free_bytes
    assert (size, number) == ((256 * MIB, 8) if utilization <= 0.95 else (size, number))
    assert number >= LEAST_SLOTS
    assert size >= LEAST_SLOT_BYTES


def test_a_cpu_is_not_bounded():
    assert spare_bytes(torch.device("cpu"), 5) is None
    assert fitted_staging(512 * MIB, None) == 512 * MIB


@given(st.integers(MIB, GIB), st.integers(0, GIB))
def test_staging_takes_what_is_spare(wanted, spare):
    fitted = fitted_staging(wanted, spare)
    assert MIB <= fitted <= wanted
    assert fitted == wanted or fitted == max(spare, 16 * MIB)


class Recording(MemoryEngine):
    def register(self, spans):
        self.given_bytes = sum(span.length_bytes for span in spans)
        super().register(spans)


@pytest.mark.parametrize(
    ("spare", "expected"), [(GIB, (32, 6)), (352 * MIB + 8192, (32, 5)), (171 * MIB, (18, 4)), (0, (16, 4))]
)
def test_slots_shrink_and_peers_are_told_their_size(monkeypatch, caplog, spare, expected):
    reserved = []
    monkeypatch.setattr(local, "spare_bytes", lambda device, some: reserved.append(some) or spare)
    engine, memory = Recording("127.0.0.1"), torch.zeros(8, 2, 16, 2, 8, dtype=torch.float16)
    spec = AttentionSpec(16, 2, 8, torch.float16)
    tensors = {"a": CacheTensor(memory, "block plane token head content")}
    cache = RankCache(KVCacheConfig(8, (KVCacheGroup(("a",), spec),)), {0: 16}, tensors)
    sent = SentCache(cache, CacheMeaning(named(), None, 1))
    slots = {"slot_bytes": 32 * MIB, "num_slots": 6}
    config = parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": slots})
    with caplog.at_level(logging.INFO):
        traits = RankTraits(reserved_bytes=77, sent=sent)
        worker = TransferWorker(config, traits, engine=engine)
    try:
        assert reserved == [77]
        size, number = (
            worker.local.introduction.slot_bytes,
            len(worker.decode.bay._pool.slots),
        )
        assert (size // MIB, number) == expected
        assert engine.given_bytes <= max(spare, taken(16 * MIB, 4, 2))
        changes = worker.changes()
        counted = {} if changes is None else changes.counters.get("failures", {})
        assert ("slots_reduced" in counted) == (expected != (32, 6))
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == (expected != (32, 6))
        assert all(f"{expected[1]} of {size}" in text and "77" in text for text in warnings)
        assert any(f"{expected[1]} of {size} bytes each way" in text for text in caplog.messages)
    finally:
        worker.close()


def test_what_does_not_fit_at_all_names_its_numbers(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ConfigError, match=r"4 slots of 16777216 bytes do not fit on cpu.*gpu_memory_util"):
        Arena("cpu", 16 * MIB, 4)
