"""Landing slots of a peer of this machine: P packs into them, as memory of its own process.

Both workers are in this process, where D's slots lie at two addresses: an address of D's that is written as
it is would show.
"""

from __future__ import annotations

import ctypes
import os
from unittest import mock

import msgspec
import pytest
import torch

from kvconnect.config import ExtraConfig
from kvconnect.engine.lanes import Transport
from kvconnect.pack.packer import Packer
from kvconnect.pack.shared_memory import SharedMemory
from kvconnect.peer.messages import Fetch, Grant, Landed, Written
from kvconnect.prefill import outbox
from tests.transfer.kernels import SlowKernels
from tests.transfer.pair import D_IDS, PAGE_BYTES, SLOT_BYTES, Pair, quarantined
from tests.transfer.test_hostile import fails_alone

SOURCE = tuple(range(1, 11))
TARGET = tuple(range(31, 21, -1))
"""Five chunks."""
SCRATCH_BYTES = 8 * SLOT_BYTES


class EngineUse:
    """What P's engine and its send slots were used for."""

    def __init__(self, pair: Pair) -> None:
        self.batches, self.peers, self.slots = [], [], []
        engine, pool = pair.prefill.engine, pair.prefill.send
        engine.submit = noted(self.batches, engine.submit)
        engine.connect = noted(self.peers, engine.connect)
        pool.take = noted(self.slots, pool.take)

    def __bool__(self) -> bool:
        return bool(self.batches or self.peers or self.slots)


def noted(calls, call):
    return lambda *given: (calls.append(given), call(*given))[1]


@pytest.fixture
def pair():
    return Pair(shared=True)


def test_pages_are_packed_into_the_peers_slots_and_the_engine_is_not_used(pair):
    use, before = EngineUse(pair), pair.decode.storage.clone()
    pair.start("a", SOURCE, TARGET, run_s=0.1)
    assert pair.landed(SOURCE, TARGET)
    others = [block for block in range(50) if block not in TARGET]
    assert torch.equal(pair.decode.storage[:, others], before[:, others])
    assert not use
    assert len(pair.network.heard(Landed)) == 5
    assert all(landed.digest is not None for landed in pair.network.heard(Landed))
    (found,) = pair.network.heard(Transport)
    assert (found.lane, found.known_by) == ("shared_memory", "its landing slots are mapped")
    for worker, direction in ((pair.prefill, "sent"), (pair.decode, "received")):
        moved = {"direction": direction, "lane": "shared_memory"}
        assert worker.count("transfer_bytes", **moved) == 3 * len(SOURCE) * PAGE_BYTES
        assert worker.count("transfers", direction=direction, outcome="ok") == 1
        assert worker.count("failures") == 0
    pair.assert_idle()


def test_a_link_is_measured_by_copies_of_its_own_and_reported_with_a_rate():
    pair = Pair(shared=True, scratch_bytes=SCRATCH_BYTES)
    use = EngineUse(pair)
    pair.start(run_s=0.1)
    assert pair.landed()
    (found,) = pair.network.heard(Transport)
    assert found.bytes_per_s > 0
    assert not use
    pair.assert_idle()


def test_a_chunk_is_reported_before_the_next_is_packed_and_a_turn_packs_a_few():
    pair = Pair(ExtraConfig(num_slots=64), prefill_blocks=120, decode_blocks=130, shared=True)
    source, target = tuple(range(1, 61)), tuple(range(121, 61, -1))
    happened = []

    pair.network.insert(Landed, lambda landed: happened.append("reported") or [landed])
    pair.start("a", source, target)
    # Four chunks, each of which has six pages.
    few_bytes = mock.patch.object(outbox, "_MOST_BYTES_IN_TURN", 4 * 6 * PAGE_BYTES)
    with mock.patch.object(Packer, "pack", noted(happened, Packer.pack)), few_bytes:
        turns = []
        for _ in range(60):
            before = len(happened)
            sleep_s = pair.prefill.transfers.step(pair.clock.now)
            pair.decode.step(pair.clock.now)
            chunks, rest = divmod(len(happened) - before, 2)
            assert not rest
            # The turn that begins a fetch has a look at it more.
            assert chunks <= (4 if turns else 8), "messages are taken between turns"
            if chunks:
                turns.append(chunks)
                assert sleep_s < 0.01 or sum(turns) == 30, "nobody wakes it for the rest"
    assert happened[1::2] == ["reported"] * 30
    assert all(one != "reported" for one in happened[::2])
    assert sum(turns) == 30
    pair.prefill.results.append(pair.prefill.reports.take())
    pair.settle()
    assert pair.landed(source, target)
    pair.assert_idle()


# What D may say of its memory


def end_of(pair):
    card = pair.decode.arenas[0].card
    return card.address + card.length_bytes


OUTSIDE = {
    "before": lambda pair, foreign: pair.decode.arenas[0].card.address - SLOT_BYTES,
    "into the beginning": lambda pair, foreign: pair.decode.arenas[0].card.address - 1,
    "over the end": lambda pair, foreign: end_of(pair) - 768 + 1,
    "after": lambda pair, foreign: end_of(pair),
    "P's own memory": lambda pair, foreign: ctypes.addressof(foreign),
    "send slots": lambda pair, foreign: pair.decode.send.slots[0].address,
    "pages": lambda pair, foreign: pair.decode.storage.data_ptr(),
    "far": lambda pair, foreign: 2**62 - 1,
}


@pytest.mark.parametrize("where", OUTSIDE)
def test_a_slot_outside_of_the_mapping_is_refused_and_nothing_is_written(pair, where):
    foreign = (ctypes.c_uint8 * SLOT_BYTES)()
    address = OUTSIDE[where](pair, foreign)
    pair.network.change(Fetch, times=1, grants=(Grant(address, SLOT_BYTES, 7),) * 2)
    sent = pair.decode.arenas[1]._storage.clone()
    fails_alone(pair, "the prefill node cannot pack its chunks")
    (answer,) = [written for written in pair.network.heard(Written) if not written.ok]
    assert f"bytes at {address:#x} are named, the peer's slots are the" in answer.error.text
    assert answer.quiescent
    assert not any(foreign)
    assert torch.equal(pair.decode.arenas[1]._storage, sent)
    assert not pair.decode.storage[:, list(D_IDS)].any()
    assert bytes(pair.decode.arenas[0]._shared.memory[-16:]) == pair.decode.arenas[0].card.nonce


def test_scratch_memory_outside_of_the_mapping_is_refused_and_nothing_is_written():
    pair = Pair(shared=True, scratch_bytes=SCRATCH_BYTES)
    foreign = (ctypes.c_uint8 * SCRATCH_BYTES)()
    scratch = pair.prefill.arenas[0]
    scratch.view(scratch.scratch_address, SCRATCH_BYTES).fill_(7)
    pair.decode.introduce(scratch_address=ctypes.addressof(foreign))
    pair.start(run_s=0.1)
    assert "are named, the peer's slots are the" in pair.decode.failed["a"]
    assert not any(foreign)
    assert pair.prefill.sent == ["a"]
    pair.assert_idle()


@pytest.mark.parametrize(
    ("changes", "failures"),
    [
        ({"machine": "another boot pid:[4026531836]"}, 0),
        ({"machine": ""}, 0),
        (None, 0),
        ({"nonce": b"0123456789abcdef"}, 1),
        ({"descriptor": 2**31 - 1}, 1),
        ({"descriptor": "a plain file"}, 1),
        ({"descriptor": "shorter memory"}, 1),
        ({"pid": 2**31 - 1}, 1),
    ],
    ids=str,
)
def test_slots_that_cannot_be_mapped_are_written_by_the_engine(pair, changes, failures, caplog):
    use, other = EngineUse(pair), SharedMemory(4096)
    with open(os.devnull, "rb") as plain:
        opened = {"a plain file": plain.fileno(), "shorter memory": other.card.descriptor}
        card = pair.decode.local.introduction.memory
        fields = {name: opened.get(value, value) for name, value in (changes or {}).items()}
        pair.decode.introduce(memory=msgspec.structs.replace(card, **fields) if fields else None)
        pair.start(run_s=0.1)
    assert pair.landed()
    assert len(use.batches) == len(use.slots) == 2
    assert (
        pair.prefill.count("failures", reason="shared_memory") == pair.prefill.count("failures") == failures
    )
    assert ("are not mapped, so the engine writes them" in caplog.text) == bool(failures)
    pair.assert_idle()


# How it ends


def test_a_cancelled_fetch_is_not_answered_while_a_slot_is_being_packed(pair):
    with SlowKernels("source") as kernels:
        pair.start("a", SOURCE, TARGET, run_s=0)
        assert kernels.pending
        pair.abort("a", run_s=0)
        assert not pair.network.heard(Written), "the kernel may write D's slots"
        assert not pair.prefill.sent, "and reads P's blocks"
        assert pair.decode.received == ["a"]
        assert quarantined(pair.decode.landing) == 5
        kernels.finish()
        pair.settle()
    (written,) = pair.network.heard(Written)
    assert (written.ok, written.quiescent) == (False, True)
    assert not pair.network.heard(Landed), "what nobody waits for is not reported"
    pair.assert_idle()
