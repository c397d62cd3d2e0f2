"""Prompts that are sent while they are computed: what lands when, and that nothing else counts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.config import ExtraConfig
from kvconnect.decode.rank_fetches import MOST_REPEATS
from kvconnect.peer.messages import Accepted, Fetch, Landed, Written
from kvconnect.plan.chunks import Chunk, TokenSpan
from kvconnect.prefill.outbox import SlotOutbox
from kvconnect.transfer.orders import LetGo, Orders
from tests.prefill.prefills import Prefill
from tests.transfer.kernels import SlowKernels
from tests.transfer.pair import BLOCK_TOKENS, Pair

SOURCE, OTHER = tuple(range(1, 11)), tuple(range(30, 20, -1))
TARGET = tuple(range(12, 22))
TOKENS = 10 * BLOCK_TOKENS


@pytest.fixture(params=[False, True], ids=["engine", "shared memory"])
def pair(request):
    """Ten blocks are five chunks, and there are slots for all of them."""
    return Pair(shared=request.param)


def begun(pair, computed=0):
    """A prefill that D asks for, and of which so much is computed then."""
    prefill = Prefill(pair, SOURCE, TOKENS)
    pair.load("a", TARGET, num_tokens=TOKENS)
    pair.settle()
    if computed:
        prefill.to(computed)
        pair.settle()
    return prefill


def arrives(pair, prefill, **changes):
    """The prefill ends, and all of it lands."""
    prefill.hold(**changes)
    pair.settle()
    assert prefill.landed(TARGET)
    idle(pair)
    assert (pair.decode.received, pair.decode.failed, pair.prefill.sent) == (["a"], {}, ["a"])


def let_go(worker, pair, handle):
    """A worker of D will not fetch under a handle."""
    worker.order(Orders(let_go=(LetGo(handle, ("P", "h", pair.prefill.channel.port)),)))


def chunks_landed(pair):
    return [landed.chunk for landed in pair.network.heard(Landed)]


def idle(pair):
    pair.settle(2)
    pair.assert_idle()


def test_chunks_land_as_they_are_computed(pair):
    prefill = begun(pair)
    (fetch,) = pair.network.heard(Fetch)
    ends = [max(span.stop for span in chunk.spans) for chunk in fetch.chunks]
    assert len(ends) == 5
    for tokens in range(3, TOKENS + 1, 3):
        prefill.to(tokens)
        pair.settle()
        assert chunks_landed(pair) == [index for index, end in enumerate(ends) if end <= tokens]
        assert not pair.decode.received
    arrives(pair, prefill)
    assert chunks_landed(pair) == [0, 1, 2, 3, 4]
    assert pair.prefill.count("streamed_requests") == 1
    assert 0 < pair.prefill.count("streamed_bytes") < pair.prefill.count("transfer_bytes", direction="sent")


def test_nothing_is_done_for_a_prefill_that_nobody_asks_for(pair):
    prefill = Prefill(pair, SOURCE, TOKENS)
    prefill.to(20, ready=lambda: pytest.fail("nobody waits for it"))
    pair.settle()
    assert pair.prefill.transfers.step(pair.clock.now) > 1
    prefill.withdraw()
    idle(pair)


def test_all_that_is_written_counts_only_once_the_request_is_held(pair):
    prefill = begun(pair, TOKENS)
    pair.run(20)
    assert chunks_landed(pair) == [0, 1, 2, 3, 4]
    assert not pair.network.heard(Written)
    assert pair.prefill.transfers.step(pair.clock.now) > 1, "there is nothing to poll for"
    # The device was known to be done before.
    arrives(pair, prefill, ready=lambda: False)


def test_what_the_device_has_not_computed_is_not_packed(pair):
    prefill, done = begun(pair), []
    prefill.order(lambda: len(done) > 0, progress=(prefill.news(20),))
    prefill.order(lambda: len(done) > 1, progress=(prefill.news(30),))
    pair.settle()
    assert not chunks_landed(pair)
    assert not pair.prefill.transfers.prefill.has_work
    assert pair.prefill.transfers.step(pair.clock.now) < 0.01, "nobody wakes it when the device is done"
    prefill.compute(20)
    done.append("first")
    pair.run(0.01)
    assert chunks_landed(pair) == [0, 1]
    assert not pair.prefill.transfers.prefill.has_work
    prefill.compute(30)
    done.append("second")
    pair.run(0.01)
    assert chunks_landed(pair) == [0, 1, 2]
    prefill.hold(ready=lambda: len(done) > 2)
    pair.settle()
    assert pair.prefill.transfers.prefill.has_work, "the rest goes on as soon as the device is done"
    assert not pair.decode.received
    done.append("third")
    pair.settle()
    assert prefill.landed(TARGET)
    idle(pair)


def test_the_time_that_an_engine_gets_is_not_used_up_by_waiting_for_the_prefill():
    pair = Pair(ExtraConfig(transfer_timeout_s=2, peer_timeout_s=3, load_timeout_s=50))
    prefill = begun(pair)
    for tokens in range(8, TOKENS + 1, 8):
        pair.run(8, step_s=0.5)
        prefill.to(tokens)
    pair.settle()
    arrives(pair, prefill)
    assert pair.prefill.count("transfer_seconds", direction="sent") < 1, "waiting is no sending"


@pytest.mark.parametrize("tokens", [16, TOKENS])
def test_a_withdrawn_prefill_ends_what_is_sent_of_it_with_the_reason(pair, tokens):
    prefill = begun(pair, tokens)
    prefill.withdraw("the prefill was aborted, or failed")
    pair.settle()
    assert pair.decode.failed == {"a": "the prefill was aborted, or failed"}
    idle(pair)


@pytest.mark.parametrize("again_from", [8, 24, TOKENS])
def test_a_preempted_prefill_is_sent_again_from_its_new_blocks(pair, again_from):
    prefill = begun(pair, 28)
    assert len(chunks_landed(pair)) == 3
    prefill.lose(OTHER)
    pair.settle()
    (written,) = pair.network.heard(Written)
    assert (written.ok, written.quiescent, written.again) == (False, True, True)
    assert not pair.decode.received
    prefill.to(again_from)
    pair.settle()
    assert len(pair.network.heard(Fetch)) == 2
    arrives(pair, prefill)
    assert len({accepted.epoch for accepted in pair.network.heard(Accepted)}) == 2
    assert pair.prefill.count("failures", reason="preempted") == 1
    assert pair.prefill.count("transfers", direction="sent", outcome="again") == 1


def test_a_pack_that_was_launched_before_the_preemption_does_not_count(pair):
    with SlowKernels("source") as kernels:
        prefill = begun(pair, 28)
        assert kernels.pending
        prefill.lose(OTHER)
        pair.settle()
        assert not pair.network.heard(Written), "a kernel still reads, and may be written to a slot"
        kernels.finish()
        pair.settle()
        kernels.slow = False
        prefill.to(20)
        pair.settle()
        arrives(pair, prefill)


def test_an_unpack_of_what_was_lost_ends_before_the_new_one(pair):
    with SlowKernels("target") as kernels:
        prefill = begun(pair, 28)
        lost = len(kernels.pending)
        assert lost
        prefill.lose(OTHER)
        prefill.hold()
        pair.settle()
        assert len(kernels.pending) == lost, "it is asked for anew once the old kernels have run"
        assert not pair.decode.received
        while not pair.decode.received:
            assert kernels.finish(1)
            pair.settle()
        assert not kernels.pending
    assert prefill.landed(TARGET)
    idle(pair)


def test_what_was_lost_in_the_step_that_ends_the_prefill_does_not_count(pair):
    """One step may say that a request was preempted, went on, and is held."""
    prefill = begun(pair, TOKENS)
    assert len(chunks_landed(pair)) == 5
    prefill.noise()
    prefill.source, prefill.computed, prefill.told = OTHER, 0, 0
    prefill.compute(TOKENS)
    prefill.order(preempted=(prefill.handle,), progress=(prefill.news(TOKENS),))
    arrives(pair, prefill)
    assert len(pair.network.heard(Fetch)) == 2


def test_a_fetch_is_not_repeated_without_end(pair):
    prefill = begun(pair)
    blocks = [SOURCE, OTHER]
    for number in range(MOST_REPEATS + 1):
        assert not pair.decode.received
        prefill.to(20)
        pair.settle()
        prefill.lose(blocks[(number + 1) % 2])
        pair.settle()
    assert pair.decode.failed == {"a": "the prefill was preempted"}
    prefill.hold()
    pair.settle()
    assert pair.prefill.sent == ["a"]
    idle(pair)


def test_an_abort_is_not_asked_anew(pair):
    """P's word that it begins again and D's cancel cross on their way."""
    prefill = begun(pair, 20)
    prefill.lose(OTHER)
    pair.prefill.step(pair.clock.now)
    pair.abort("a")
    pair.settle()
    assert pair.decode.received == ["a"]
    assert len(pair.network.heard(Fetch)) == 1
    prefill.withdraw()
    pair.run(6)
    idle(pair)


def test_what_was_sent_does_not_count_if_fewer_tokens_are_held(pair):
    prefill = begun(pair, 20)
    prefill.hold(num_tokens=TOKENS - 1)
    pair.settle()
    assert pair.network.heard(Written)[0].again
    assert pair.decode.failed == {
        "a": f"the prefill node holds {TOKENS - 1} tokens of it, and the decode node's prompt needs {TOKENS}"
    }
    idle(pair)


def test_what_was_sent_does_not_count_if_other_blocks_are_held(pair):
    """Whoever says so has not said that the request was preempted."""
    prefill = begun(pair, 20)
    prefill.noise()
    prefill.source, prefill.computed = (*SOURCE[:3], *OTHER[3:]), 0
    arrives(pair, prefill)
    assert pair.network.heard(Written)[0].again


def test_progress_that_does_not_follow_is_not_sent_and_the_request_still_is(pair):
    prefill = begun(pair, 20)
    prefill.told += 1
    prefill.to(32)
    pair.settle()
    prefill.to(36)
    pair.settle()
    assert len(chunks_landed(pair)) == 2
    arrives(pair, prefill)
    assert pair.prefill.count("failures", reason="preempted") == 1


def test_another_engine_gets_nothing_of_what_is_being_sent(pair):
    prefill = begun(pair, 20)
    let_go(pair.add("X"), pair, prefill.handle)
    pair.settle()
    arrives(pair, prefill)


def test_one_rank_is_sent_a_prefill_once(pair):
    prefill = begun(pair, 20)
    pair.load("b", OTHER, handle=prefill.handle)
    pair.settle()
    assert pair.decode.failed == {"b": "this decode rank is being sent this request"}
    prefill.hold()
    pair.settle()
    assert prefill.landed(TARGET)
    pair.run(6)
    idle(pair)


def test_hostile_chunks_of_a_prefill_fail_alone(pair):
    prefill = Prefill(pair, SOURCE, TOKENS)
    prefill.to(20)
    for number, chunks in enumerate(
        (
            (Chunk(0, 3, (TokenSpan(7, 0, 4),)),),
            (Chunk(0, 9, (TokenSpan(0, 0, 4),)),),
            (Chunk(0, 3, (TokenSpan(0, 0, 4), TokenSpan(0, 4, 8))),),
            (Chunk(0, 3, (TokenSpan(0, 0, 16),)),),
            (Chunk(0, 3, (TokenSpan(0, 0, 4),)), Chunk(0, 3, (TokenSpan(0, 0, TOKENS + 1),))),
        )
    ):
        pair.network.change(Fetch, times=1, chunks=chunks)
        pair.load(f"r{number}", TARGET, handle=prefill.handle)
        pair.run(0.1)
        assert f"r{number}" in pair.decode.failed
        assert not pair.prefill.transfers.prefill.sender.sendings
        # Whoever fails lets go of the handle, and of this one it is not to be taken.
        pair.prefill.transfers.prefill.book.expected[prefill.handle].finished.clear()
    prefill.withdraw()
    pair.run(6)
    idle(pair)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_whatever_happens_to_prefills_what_is_reported_is_true_and_everything_is_forgotten(seed):
    """Several at a time: they begin, go on, are preempted, withdrawn or held; D asks sooner or later, even
    before they begin, or aborts, or lets go."""
    rng = random.Random(seed)
    pair = Pair(
        ExtraConfig(num_slots=rng.choice([1, 2, 6])),
        slot_bytes=rng.choice([512, 1024, 4096]),
        prefill_blocks=120,
        decode_blocks=60,
    )
    source, target = iter(rng.sample(range(1, 120), 119)), iter(rng.sample(range(1, 60), 59))
    plans, targets, prefills, ended = {}, {}, {}, {}
    for name in [f"r{n}" for n in range(rng.randint(1, 4))]:
        blocks = rng.randint(1, 8)
        plans[name] = tuple(next(source) for _ in range(blocks)), rng.randint(4 * blocks - 3, 4 * blocks)
        targets[name] = tuple(next(target) for _ in range(blocks))
    asked, aborted, early, unwanted = set(), set(), set(), set()
    longest_s = rng.choice([1.0, 4.0])

    def begin(name):
        prefills[name] = Prefill(pair, *plans[name], handle=f"handle-{name}")

    with SlowKernels("source", "target") as kernels:
        kernels.slow = rng.random() < 0.5
        for _ in range(rng.randint(5, 40)):
            name = rng.choice(list(plans))
            prefill = prefills.get(name)
            is_running = prefill is not None and name not in ended
            match rng.choice(["begin", "on", "on", "on", "lose", "end", "ask", "ask", "abort", "let go"]):
                case "begin" if prefill is None:
                    begin(name)
                case "ask" if name not in asked | unwanted:
                    asked.add(name)
                    early |= {name} - set(prefills)
                    pair.load(name, targets[name], num_tokens=plans[name][1])
                case "let go" if name not in asked | unwanted:
                    unwanted.add(name)
                    let_go(pair.decode, pair, f"handle-{name}")
                case "abort" if name in asked:
                    aborted.add(name)
                    pair.abort(name)
                case "on" if is_running:
                    prefill.to(rng.randint(prefill.computed, prefill.num_tokens))
                case "lose" if is_running and rng.random() < 0.4:
                    prefill.lose(tuple(next(source, 1) for _ in prefill.source))
                    if 1 in prefill.source:
                        prefill.withdraw()
                        ended[name] = "withdrawn"
                case "end" if is_running and rng.random() < 0.3:
                    ended[name] = rng.choice(["held", "held", "withdrawn"])
                    prefill.hold(name) if ended[name] == "held" else prefill.withdraw()
                    if ended[name] == "withdrawn":
                        prefill.noise()
            kernels.finish(rng.choice([0, 1, 5]))
            if rng.random() < 0.7:
                pair.run(rng.choice([0.0, 0.0, 0.1, longest_s]), step_s=0.5)
        kernels.slow = False
        for name in plans:
            if name not in prefills:
                begin(name)
            if name not in ended:
                ended[name] = "held"
                prefills[name].hold(name)
        for _ in range(60):
            kernels.finish()
            pair.settle(2)
    pair.run(130, step_s=1)
    held = [name for name, end in ended.items() if end == "held"]
    assert sorted(pair.prefill.sent) == sorted(held)
    assert sorted(pair.decode.received) == sorted(asked)
    for name in asked:
        if name in pair.decode.failed:
            is_known = name in aborted | early or ended[name] != "held"
            assert is_known or "preempted" in pair.decode.failed[name]
        else:
            assert prefills[name].landed(targets[name])
    idle(pair)


def test_a_fetch_whose_beginning_raises_leaves_a_lease_that_ends(pair, monkeypatch):
    prefill = Prefill(pair, SOURCE, TOKENS)
    prefill.to(8)

    def fail_once(outbox, grants):
        monkeypatch.undo()
        raise RuntimeError("the device failed")

    monkeypatch.setattr(SlotOutbox, "grant", fail_once)
    pair.load("a", TARGET, num_tokens=TOKENS)
    pair.run(0.5)
    prefill.hold()
    pair.run(pair.config.lease_max_s + 1, step_s=5)
    assert len(pair.prefill.sent) == 1
    assert pair.prefill.count("failures", reason="internal") == 0
    idle(pair)
