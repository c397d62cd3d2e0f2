"""Requests that end early, in each state that they can be in.

A request is reported once, and never while a kernel of ours still works for it; what a peer may still
write is a slot. So from its report on, nobody touches its blocks.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

from kvconnect.config import ExtraConfig
from kvconnect.decode.loads import RankFetchState
from kvconnect.errors import LocalError
from kvconnect.pack.packer import Packer
from kvconnect.peer.messages import Fetch, Landed, Refused, Written
from tests.transfer.kernels import SlowKernels
from tests.transfer.pair import PAGE_BYTES, Pair, quarantined

SOURCE = tuple(range(1, 11))
TARGET = tuple(range(31, 21, -1))
"""Five chunks."""
CONFIG = ExtraConfig(
    num_slots=2, load_timeout_s=10, peer_timeout_s=4, lease_s=6, transfer_timeout_s=30, quarantine_s=40
)
LONGEST_S = CONFIG.load_timeout_s + CONFIG.quarantine_s + 1
STATES = ("asked", "some landed", "unpacking", "written")
ENDS = ("abort", "deadline", "silence", "death", "refusal")


@pytest.fixture
def pair():
    return Pair(CONFIG)


@pytest.fixture
def kernels():
    with SlowKernels("target") as kernels:
        yield kernels


def bring_to(pair, kernels, state):
    """Begin a request, and let it get so far."""
    pair.prefill.engine.hold()
    pair.start("a", SOURCE, TARGET, run_s=0)
    if state == "asked":
        return
    for _ in range(40):
        landed = len(pair.network.heard(Landed))
        waits = {"some landed": landed > 1, "unpacking": landed, "written": False}[state]
        (pair.prefill.engine.hold if waits else pair.prefill.engine.release)()
        pair.settle(1)
        if state != "unpacking" and not (state == "written" and pair.network.heard(Written)):
            kernels.finish()
    expected = {"written": RankFetchState.UNPACKING}.get(state, RankFetchState.ASKED)
    (rank_fetch,) = pair.decode.transfers.decode.loads["a"].fetches.values()
    assert rank_fetch.state is expected
    assert bool(kernels.pending) == (state in ("unpacking", "written"))


def end(pair, how):
    match how:
        case "abort":
            pair.abort("a")
        case "deadline":
            pair.run(CONFIG.load_timeout_s - 0.01)
            assert not pair.decode.received
            pair.clock.now += 0.02
        case "silence":
            pair.cut()
        case "death":
            pair.network.kill(pair.prefill.channel.port)
        case "refusal":
            pair.say(Refused(2, "who are you?"))


def watch(pair, kernels, seconds, step_s=0.5):
    """Let time pass; from the report on the blocks are somebody else's, and nothing may change them."""
    until = pair.clock.now + seconds
    reported = None
    while pair.clock.now < until:
        pair.run(step_s, step_s=step_s)
        if kernels.pending:
            assert not pair.decode.received, "reported while a kernel of ours writes its blocks"
        if pair.decode.received and reported is None:
            reported = pair.decode.storage.view(torch.int16).clone()
        if reported is not None:
            assert pair.decode.storage.view(torch.int16).equal(reported), "written after it was reported"


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("state", STATES)
def test_whenever_and_however_a_request_ends(pair, kernels, state, how):
    bring_to(pair, kernels, state)
    end(pair, how)
    watch(pair, kernels, 6)
    pair.release()
    watch(pair, kernels, 2)
    kernels.finish()
    survives = state == "written" and how in ("silence", "death", "refusal")
    for _ in range(40):
        pair.run(0.5, step_s=0.5)
        kernels.finish()
    assert pair.decode.received == ["a"]
    assert ("a" in pair.decode.failed) != survives
    if survives:
        assert pair.landed(SOURCE, TARGET)
    watch(pair, kernels, LONGEST_S)
    assert pair.decode.received == ["a"]
    pair.decode.assert_idle()
    if how != "death":
        assert pair.prefill.sent == ["a"]
        pair.assert_idle()


@pytest.mark.parametrize("how", ["abort", "deadline"])
@pytest.mark.parametrize("state", ["asked", "some landed"])
def test_without_a_kernel_at_work_the_end_is_reported_at_once(pair, kernels, state, how):
    bring_to(pair, kernels, state)
    held = pair.decode.landing.taken
    end(pair, how)
    pair.decode.step(pair.clock.now)
    assert pair.decode.received == ["a"]
    assert quarantined(pair.decode.landing) == held > 0, "the peer has not said that it stopped"
    pair.settle()
    assert pair.decode.landing.taken == 0, "it has"
    assert pair.prefill.sent == ["a"]
    pair.assert_idle()


def test_a_peer_that_forgot_us_is_not_asked_again_while_we_unpack_what_it_sent(pair, kernels):
    """What is asked anew may land in the same pages before the old kernel has run."""
    bring_to(pair, kernels, "unpacking")
    end(pair, "refusal")
    pair.release()
    for _ in range(40):
        old, kernels.pending = kernels.pending[:1], kernels.pending[1:]
        kernels.finish()
        kernels.pending = old
        pair.settle(1)
        assert not pair.decode.received, "the first chunk's kernel has not run"
    kernels.finish()
    watch(pair, kernels, LONGEST_S)
    assert pair.decode.received == ["a"]
    pair.assert_idle()


@pytest.mark.parametrize("then", ["abort", "silence", "death", "nothing"])
def test_what_has_to_be_sent_again_is_asked_for_once_the_old_kernel_has_run(pair, kernels, then):
    """The peer lost the blocks that it sent from; what it sent already is still being unpacked."""
    bring_to(pair, kernels, "unpacking")
    pair.say(Written(1, False, True, 0, 0, 0.0, "the prefill was preempted", again=True))
    pair.settle(2)
    if then != "nothing":
        end(pair, then)
    watch(pair, kernels, 6)
    assert not pair.decode.received
    assert len(pair.network.heard(Fetch)) == 1
    pair.release()
    for _ in range(40):
        kernels.finish()
        pair.settle(1)
    watch(pair, kernels, LONGEST_S)
    assert pair.decode.received == ["a"]
    pair.decode.assert_idle()


def test_what_was_moved_is_counted_once_however_often_the_peer_says_so(pair, kernels):
    pair.network.insert(Written, lambda written: [written] * 3)
    bring_to(pair, kernels, "written")
    kernels.finish()
    pair.settle()
    assert pair.landed(SOURCE, TARGET)
    for name, amount in (("transfer_bytes", len(SOURCE) * 3 * PAGE_BYTES), ("copies", 5)):
        assert pair.decode.count(name, direction="received") == amount
    pair.assert_idle()


def test_what_a_kernel_finds_wrong_fails_the_request_after_all_was_written(pair, kernels):
    def spoil_last(landed):
        return [msgspec.structs.replace(landed, digest=1) if landed.chunk == 4 else landed]

    pair.network.insert(Landed, spoil_last)
    bring_to(pair, kernels, "written")
    assert not pair.decode.received
    kernels.finish()
    pair.settle()
    assert "another digest" in pair.decode.failed["a"]
    assert pair.decode.received == ["a"]
    pair.assert_idle()


def test_kernels_that_run_keep_both_sides_awake(pair):
    for side, worker in (("source", pair.prefill), ("target", pair.decode)):
        with SlowKernels(side) as kernels:
            pair.start(side, SOURCE, TARGET, run_s=0)
            assert kernels.pending
            assert worker.transfers.step(pair.clock.now) < 0.01, "nobody wakes it when the kernel is done"
            for _ in range(20):
                kernels.finish()
                pair.settle(1)
            assert side in pair.decode.received
    assert pair.prefill.transfers.step(pair.clock.now) > 1
    assert pair.decode.transfers.step(pair.clock.now) >= 1
    pair.assert_idle()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), LocalError("too many"), KeyError(7)])
@pytest.mark.parametrize(
    ("side", "what"), [("source", "stage"), ("source", "pack"), ("target", "stage"), ("target", "unpack")]
)
def test_a_kernel_that_cannot_be_launched_fails_one_request(pair, monkeypatch, side, what, error):
    real, left = getattr(Packer, what), [error]

    def fail_once(packer, *args):
        if packer._side == side and left:
            raise left.pop()
        return real(packer, *args)

    monkeypatch.setattr(Packer, what, fail_once)
    pair.start("fails", SOURCE, TARGET, run_s=0)
    pair.start("works", (20, 21), (40, 41))
    pair.settle(20)
    assert pair.decode.failed.keys() == {"fails"}
    assert pair.landed((20, 21), (40, 41))
    assert sorted(pair.decode.received) == ["fails", "works"]
    assert pair.decode.count("failures", reason="internal") == 0
    pair.assert_idle()
