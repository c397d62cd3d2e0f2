"""Chunks that travel coded: exact, fewer bytes, and as they are wherever they cannot or need not be coded."""

from __future__ import annotations

import logging

import pytest
import torch

from kvconnect.config import ExtraConfig
from kvconnect.pack.exponent_code import ExponentCoder, coded_bytes
from kvconnect.peer.messages import Landed
from kvconnect.prefill.calibration import ProbeOutbox
from tests.transfer.kernels import SlowKernels
from tests.transfer.pair import Pair

SLOT = 32 << 10
BLOCKS = 680
"""Eight whole chunks."""
SOURCE, TARGET = tuple(range(5, 5 + BLOCKS)), tuple(range(700, 700 - BLOCKS, -1))
PAGE_BYTES = 128
RAW = 3 * BLOCKS * PAGE_BYTES


def made(prefill="on", decode="on", **more):
    config = ExtraConfig(exponent_coding=decode)
    pair = Pair(
        config,
        prefill_config=ExtraConfig(exponent_coding=prefill),
        **{"slot_bytes": SLOT, "prefill_blocks": 900, "decode_blocks": 800, **more},
    )
    words = pair.prefill.storage.view(torch.int16)
    words.copy_(torch.randn(words.shape).to(torch.bfloat16).view(torch.int16))
    return pair


def spoil(pair):
    """P's KV is of values that are no bfloat16: any exponents."""
    words = pair.prefill.storage.view(torch.int16)
    words.copy_(torch.randint(-(2**15), 2**15, words.shape, dtype=torch.int16))


def same(pair, source=SOURCE, target=TARGET):
    ours = pair.decode.storage.view(torch.int16)[:, list(target)]
    return torch.equal(ours, pair.prefill.storage.view(torch.int16)[:, list(source)])


def handed_over(pair, name="a"):
    """The lengths of the chunks as they landed, coded or not, of a request that arrived."""
    before = len(pair.network.heard(Landed))
    pair.decode.storage.zero_()
    pair.start(name, SOURCE, TARGET, run_s=1.0)
    assert pair.decode.received[-1] == name, pair.decode.failed
    assert not pair.decode.failed
    assert same(pair)
    return [(one.coded, one.length_bytes) for one in pair.network.heard(Landed)[before:]]


def test_kv_arrives_bit_for_bit_in_fewer_bytes():
    pair = made()
    landed = handed_over(pair)
    assert all(coded for coded, _ in landed)
    total = sum(length for _, length in landed)
    assert total == pair.decode.count("transfer_bytes", direction="received")
    # The last tile of a chunk is filled up.
    assert RAW * 6256 / 8192 <= total < 0.85 * RAW
    pair.assert_idle(60, step_s=1)


@pytest.mark.parametrize(("prefill", "decode"), [("off", "on"), ("on", "off"), ("off", "off")])
def test_both_sides_must_have_the_setting(prefill, decode):
    landed = handed_over(made(prefill, decode))
    assert not any(coded for coded, _ in landed)
    assert sum(length for _, length in landed) == RAW


def test_what_is_written_through_shared_memory_is_not_coded():
    landed = handed_over(made(shared=True))
    assert not any(coded for coded, _ in landed)


def test_code_that_no_slot_can_hold_is_not_decoded():
    """A small chunk's code is longer than the chunk, and may be longer than the slot."""
    pair = Pair(ExtraConfig(exponent_coding="on"), slot_bytes=2048)
    pair.network.change(Landed, times=1, coded=True, length_bytes=6256)
    pair.start(run_s=1.0)
    assert "the code of chunk 0 has 6256 bytes, its slot 2048" in pair.decode.failed["a"]


def test_a_chunk_whose_code_is_longer_is_not_coded():
    pair = made()
    pair.start("a", SOURCE[:16], TARGET[:16], run_s=1.0)
    assert same(pair, SOURCE[:16], TARGET[:16])
    (landed,) = pair.network.heard(Landed)
    assert (landed.coded, landed.length_bytes) == (False, 3 * 16 * PAGE_BYTES)


def test_chunks_that_cannot_be_coded_are_packed_again_and_after_some_of_them_no_more_are_tried(caplog):
    """Also in the request of which eight were tried in vain."""
    pair = made(slot_bytes=SLOT // 2)
    spoil(pair)
    with caplog.at_level(logging.WARNING):
        landed = handed_over(pair)
        assert len(landed) > 8
        assert not any(coded for coded, _ in landed)
        assert pair.prefill.count("failures", reason="exponents") == 8
        assert [one.message for one in caplog.records if "8 chunks in a row" in one.message]
        handed_over(pair, "b")
    assert pair.prefill.count("failures", reason="exponents") == 8, "no chunk of b was tried"
    assert len([one for one in caplog.records if "exponent_coding" in one.message]) == 1
    pair.assert_idle(60, step_s=1)


def test_a_chunk_that_cannot_be_coded_travels_beside_coded_ones():
    pair = made()
    # One block of the first layer has each exponent there is.
    words = pair.prefill.storage.view(torch.int16)
    words[0, SOURCE[3] : SOURCE[6]] = (torch.arange(words[0, :3].numel()) * 97 % 32768).reshape(
        words[0, :3].shape
    )
    landed = handed_over(pair)
    assert {coded for coded, _ in landed} == {True, False}
    assert pair.prefill.count("failures", reason="exponents") == [coded for coded, _ in landed].count(False)


@pytest.mark.parametrize("byte", [0, 4096, 6240, 6255])
def test_a_byte_of_the_code_that_changes_on_the_wire_fails_the_request(byte):
    pair = made()
    pair.prefill.engine.corrupt_next(byte)
    pair.start("a", SOURCE, TARGET, run_s=1.0)
    if byte == 6255:
        # This one carries nothing.
        assert not pair.decode.failed
        assert same(pair)
    else:
        assert "another digest than it was sent with" in pair.decode.failed["a"]


@pytest.mark.parametrize(
    ("decode", "fields", "match"),
    [
        ("off", {"coded": True}, "is coded, which this node has not offered to decode"),
        ("on", {"coded": False}, "bytes"),
        ("on", {"length_bytes": 1}, "has 1 of"),
    ],
)
def test_a_chunk_that_is_reported_otherwise_than_it_was_sent(decode, fields, match):
    pair = made(decode=decode)
    pair.network.change(Landed, times=1, **fields)
    pair.start("a", SOURCE, TARGET, run_s=1.0)
    assert match in pair.decode.failed["a"]


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_calibration_of_the_link_decides(monkeypatch, is_slow):
    monkeypatch.setattr(ExponentCoder, "pays_below", lambda self, bytes_per_s: bytes_per_s > 0 and is_slow)
    monkeypatch.setattr(ProbeOutbox, "bytes_per_s", 1e9)
    pair = made("auto", "auto", scratch_bytes=4096)
    landed = handed_over(pair)
    assert all(coded is is_slow for coded, _ in landed)


def test_without_a_calibration_auto_codes_nothing(monkeypatch):
    monkeypatch.setattr(ExponentCoder, "pays_below", lambda self, bytes_per_s: True)
    assert not any(coded for coded, _ in handed_over(made("auto", "auto")))


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_request_that_is_aborted_while_it_is_coded_leaves_no_slot_taken(spoiled):
    pair = made()
    if spoiled:
        spoil(pair)
    with SlowKernels("source") as kernels:
        pair.start("a", SOURCE, TARGET, run_s=0)
        assert kernels.pending
        pair.abort("a", run_s=0)
        while kernels.finish():
            pair.settle()
    pair.assert_idle(ExtraConfig().load_timeout_s + ExtraConfig().quarantine_s + 1, step_s=1)


def test_the_length_of_code_depends_on_the_number_of_bytes_alone():
    assert [coded_bytes(size) for size in (1, 8192, 8193, 256 << 20)] == [6256, 6256, 12512, 32768 * 6256]
