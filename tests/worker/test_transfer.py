"""Requests that move from P to D, and everything that may keep them from it, on a virtual clock."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.config import ExtraConfig
from kvconnect.orders import GroupBlocks, Hold, LetGo, Load, Orders, RankAddress
from kvconnect.peer.channel import MemoryNetwork
from kvconnect.peer.messages import Written
from tests.worker.pair import BLOCK_TOKENS, Clock, FakeWorker, Pair

P_IDS, D_IDS = (5, 6, 9), (21, 3, 8)


@pytest.fixture
def pair():
    return Pair()


def start(pair, request="a", source=P_IDS, target=D_IDS):
    pair.hold(request, source)
    pair.load(request, target)


def test_a_request_lands_and_both_sides_forget_it(pair):
    before = pair.decode.storage.clone()
    start(pair)
    pair.run()
    assert pair.landed(P_IDS, D_IDS)
    untouched = [block for block in range(50) if block not in D_IDS]
    assert torch.equal(pair.decode.storage[:, untouched], before[:, untouched])
    assert (pair.prefill.sent, pair.decode.received, pair.decode.failed) == (["a"], ["a"], {})
    pair.assert_idle()


def test_metrics_count_bytes_and_copies_on_both_sides(pair):
    start(pair)
    pair.run()
    page = pair.prefill.storage[0, 0].nbytes
    for worker, direction in ((pair.prefill, "sent"), (pair.decode, "received")):
        assert worker.count("transfers", direction=direction, outcome="ok") == 1
        assert worker.count("transfer_bytes", direction=direction, path="direct") == 9 * page
        assert worker.count("copies", direction=direction, path="direct") == 9


def test_nothing_is_reported_while_the_engine_holds_the_bytes(pair):
    pair.prefill.engine.hold()
    start(pair)
    pair.run(20)
    assert not pair.prefill.sent
    assert not pair.decode.received
    pair.prefill.engine.release()
    pair.run()
    assert pair.landed(P_IDS, D_IDS)
    assert pair.decode.received == ["a"]


def test_only_the_blocks_beyond_a_prefix_are_fetched(pair):
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, groups=(GroupBlocks(0, 2, D_IDS[2:]),))
    pair.run()
    assert pair.landed(P_IDS[2:], D_IDS[2:])
    assert not pair.decode.storage[:, list(D_IDS[:2])].any()


def test_a_fetch_may_come_before_the_prefill_ends(pair):
    pair.load("a", D_IDS)
    pair.run(2)
    pair.hold("a", P_IDS)
    pair.run()
    assert pair.landed(P_IDS, D_IDS)
    assert pair.decode.received == ["a"]


def test_a_lease_waits_for_the_device(pair):
    done = []
    pair.hold("a", P_IDS, ready=lambda: bool(done))
    pair.load("a", D_IDS)
    pair.run(10)
    assert not pair.decode.received
    done.append(True)
    pair.run()
    assert pair.landed(P_IDS, D_IDS)


def test_an_unknown_handle_fails_within_its_deadline(pair):
    pair.load("a", D_IDS, handle="made up")
    pair.run(ExtraConfig().early_fetch_s + 0.1)
    assert pair.decode.failed == {"a": "no request is held under this handle"}
    assert pair.decode.received == ["a"]
    start(pair, "b")
    pair.run()
    assert pair.landed(P_IDS, D_IDS)


def test_a_handle_works_once(pair):
    start(pair)
    pair.run()
    pair.load("again", D_IDS, handle="handle-a")
    pair.run(0.1)
    assert "no longer held" in pair.decode.failed["again"]


def test_a_handle_does_not_serve_more_tokens_than_are_held(pair):
    pair.hold("a", P_IDS)
    pair.load("a", (*D_IDS, 11), num_tokens=4 * BLOCK_TOKENS)
    pair.run(0.1)
    assert pair.decode.failed == {"a": "16 tokens are wanted, 12 are held"}


def test_a_lease_that_nobody_fetches_ends_and_a_late_fetch_hears_why(pair):
    pair.hold("a", P_IDS)
    pair.run(29)
    assert not pair.prefill.sent
    pair.run(2)
    assert pair.prefill.sent == ["a"]
    assert pair.prefill.count("failures", reason="lease_expired") == 1
    pair.load("a", D_IDS)
    pair.run(0.1)
    assert "its lease of 30.0 s is over" in pair.decode.failed["a"]
    pair.assert_idle()


def test_letting_go_frees_the_lease_at_once(pair):
    pair.hold("a", P_IDS)
    pair.run()
    let_go = LetGo("a", "handle-a", "P", "h", pair.prefill.channel.port)
    pair.decode.mover.order(Orders(let_go=(let_go,)), lambda: True)
    pair.run()
    assert pair.prefill.sent == ["a"]
    assert not pair.decode.received
    pair.assert_idle()


def test_a_failed_write_fails_the_load_and_frees_both_sides(pair):
    pair.prefill.engine.fail_next(quiet=True, error="the link is down")
    start(pair)
    pair.run()
    assert pair.decode.failed == {"a": "the link is down"}
    assert pair.decode.received == ["a"]
    assert pair.prefill.sent == ["a"], "D says that it will not come again"
    pair.assert_idle()


def test_a_failure_that_left_writes_under_way_keeps_blocks_on_both_sides(pair):
    pair.prefill.engine.fail_next(quiet=False)
    start(pair)
    pair.run(ExtraConfig().quarantine_s - 1)
    assert not pair.decode.received, "D's blocks may still be written"
    assert not pair.prefill.sent, "P's blocks may still be read"
    assert pair.prefill.engine.land_late() == 1
    pair.run(2)
    assert pair.decode.received == ["a"]
    assert pair.prefill.sent == ["a"]
    assert pair.decode.count("failures", reason="quarantine_over") == 1
    pair.assert_idle()


def test_aborting_a_load_waits_until_the_peer_has_stopped(pair):
    pair.prefill.engine.hold()
    start(pair)
    pair.run(1)
    pair.abort("a")
    pair.run(0.1)
    pair.prefill.engine.release()
    pair.run()
    assert pair.decode.received == ["a"]
    assert pair.decode.failed == {"a": "the request was aborted"}
    assert pair.prefill.sent == ["a"]
    pair.assert_idle()


def test_aborting_a_load_of_a_peer_out_of_reach_keeps_the_blocks(pair):
    pair.prefill.engine.hold()
    start(pair)
    pair.run(1)
    pair.network.cut(pair.prefill.channel.port, pair.decode.channel.port)
    pair.abort("a")
    pair.run(60 + 38, step_s=0.5)
    assert not pair.decode.received
    pair.run(4)
    assert pair.decode.received == ["a"]


def test_the_prefill_side_stops_by_itself_when_the_time_it_was_given_is_over(pair):
    pair.prefill.engine.delay_next(1000)
    start(pair)
    pair.prefill.mover.prefill._config = ExtraConfig(transfer_timeout_s=500, quarantine_s=500)
    pair.run(1)
    pair.network.cut(pair.prefill.channel.port, pair.decode.channel.port)
    pair.run(58)
    assert pair.prefill.mover.prefill.sendings
    pair.run(2)
    assert not pair.prefill.mover.prefill.sendings


def test_aborting_before_the_peer_was_met(pair):
    pair.load("a", D_IDS)
    pair.abort("a")
    pair.run()
    assert pair.decode.received == ["a"]
    pair.abort("a")
    pair.run()
    assert pair.decode.received == ["a"]
    pair.assert_idle()


def test_a_peer_that_is_not_there(pair):
    pair.load("a", D_IDS, port=99)
    pair.run(0.1)
    assert "nothing listens at h:99" in pair.decode.failed["a"]
    pair.assert_idle()


def test_a_peer_that_never_answers_the_greeting(pair):
    pair.network.cut(pair.prefill.channel.port, pair.decode.channel.port)
    start(pair)
    pair.run(4.9)
    assert not pair.decode.received
    pair.run(0.2)
    assert "did not answer the greeting within 5.0 s" in pair.decode.failed["a"]


def test_a_peer_that_falls_silent_while_it_writes(pair):
    pair.prefill.engine.hold()
    start(pair)
    pair.run(1)
    pair.network.cut(pair.prefill.channel.port, pair.decode.channel.port)
    pair.run(60 + 38, step_s=0.5)
    assert not pair.decode.received, "it was given 60 s, and its last write may take a while"
    pair.run(4)
    assert "silent for 10.0 s" in pair.decode.failed["a"]
    assert pair.decode.received == ["a"]


def test_a_peer_whose_process_is_gone_is_quiet_soon(pair):
    pair.prefill.engine.hold()
    start(pair)
    pair.run(1)
    pair.network.kill(pair.prefill.channel.port)
    pair.run(0.5)
    assert not pair.decode.received
    pair.run(1)
    assert "the peer is gone" in pair.decode.failed["a"]
    assert pair.decode.received == ["a"]


def test_a_slow_peer_ends_at_the_load_deadline(pair):
    pair.prefill.engine.hold()
    start(pair)
    pair.run(60.2)
    pair.prefill.engine.release()
    pair.run(1)
    assert pair.decode.received == ["a"]
    assert pair.decode.failed["a"]
    pair.run(1)
    pair.assert_idle()


def test_two_models_refuse_each_other_and_say_so():
    pair = Pair(prefill_model="gqa seed 0", decode_model="gqa seed 1")
    start(pair)
    pair.run(0.1)
    assert "model differ: 'gqa seed 1' asks 'gqa seed 0'" in pair.decode.failed["a"]
    pair.run(31)
    assert pair.prefill.sent == ["a"]


def test_another_engine_id_than_the_request_names(pair):
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, engine_id="Q")
    pair.run(0.1)
    assert "is engine P, the request names Q" in pair.decode.failed["a"]


def test_a_refused_order_is_reported_and_never_sent(pair):
    pair.load("a", D_IDS, refusal="kv_transfer_params.remote_port is 'x'")
    pair.run()
    assert pair.decode.failed == {"a": "kv_transfer_params.remote_port is 'x'"}
    assert not pair.decode.mover.decode.peers


def test_a_peer_that_forgot_us_is_met_again(pair):
    start(pair)
    pair.run()
    pair.prefill.mover.prefill.visitors.clear()
    start(pair, "b", (7, 8), (30, 31))
    pair.run(0.1)
    assert pair.decode.received == ["a", "b"]
    assert not pair.decode.failed
    assert pair.landed((7, 8), (30, 31))
    pair.assert_idle()


def test_hostile_frames_do_not_stop_the_transfer_of_others(pair):
    stranger = pair.network.channel()
    stranger.connect("x", "h", pair.prefill.channel.port)
    for data in (b"", b"\xc1", b"hello" * 1000, b"\x92\xa6cancel\x07", bytes(1 << 20)):
        stranger.send("x", data)
    start(pair)
    pair.run()
    assert pair.landed(P_IDS, D_IDS)
    assert pair.prefill.count("failures", reason="peer_message") >= 4


def test_loads_beyond_the_bound_wait_their_turn():
    pair = Pair(ExtraConfig(max_loads=2))
    pair.prefill.engine.hold()
    for n in range(5):
        start(pair, f"r{n}", (n + 1,), (n + 10,))
    pair.run(1)
    assert len(pair.prefill.mover.prefill.sendings) == 2
    pair.prefill.engine.release()
    pair.run(1)
    assert sorted(pair.decode.received) == [f"r{n}" for n in range(5)]
    assert not pair.decode.failed


def test_bytes_in_flight_keep_their_bound():
    page = 4 * 2 * 8 * 2
    pair = Pair(ExtraConfig(max_inflight_bytes=2 * page, max_batch_bytes=page))
    pair.prefill.engine.hold()
    start(pair)
    pair.run(1)
    (sending,) = pair.prefill.mover.prefill.sendings.values()
    assert sum(sending.in_flight.values()) == 2 * page
    pair.prefill.engine.release()
    pair.run(1)
    assert pair.landed(P_IDS, D_IDS)


def test_one_flipped_byte_in_a_landed_page_shows(pair):
    pair.prefill.engine.corrupt_next(100)
    start(pair)
    pair.run()
    assert pair.decode.received == ["a"]
    assert not pair.landed(P_IDS, D_IDS)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_whatever_fails_every_request_comes_back_once_and_everything_is_forgotten(seed):
    rng = random.Random(seed)
    pair = Pair()
    names = [f"r{n}" for n in range(rng.randint(1, 8))]
    source = iter(rng.sample(range(1, 40), 16))
    target = iter(rng.sample(range(1, 50), 16))
    held: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name in names:
        fault = rng.choice(["", "", "quiet", "busy", "cut", "delay", "hold", "release"])
        engine = pair.prefill.engine
        match fault:
            case "quiet":
                engine.fail_next(quiet=True)
            case "busy":
                engine.fail_next(quiet=False)
            case "cut":
                engine.cut_next(rng.randint(0, 300))
            case "delay":
                engine.delay_next(rng.random() * 5)
            case "hold":
                engine.hold()
            case "release":
                engine.release()
        held[name] = ((next(source), next(source)), (next(target), next(target)))
        late = rng.random() < 0.3
        if not late:
            pair.hold(name, held[name][0])
        pair.load(name, held[name][1])
        if rng.random() < 0.3:
            pair.run(rng.random() * 3, step_s=0.3)
        if late and rng.random() < 0.7:
            pair.hold(name, held[name][0])
        if rng.random() < 0.3:
            pair.abort(name)
        if rng.random() < 0.1:
            pair.network.cut(pair.prefill.channel.port, pair.decode.channel.port)
    pair.run(3, step_s=0.5)
    pair.network.mend(pair.prefill.channel.port, pair.decode.channel.port)
    pair.prefill.engine.release()
    pair.run(200, step_s=2.0)
    assert sorted(pair.decode.received) == names
    assert len(pair.prefill.sent) == len(set(pair.prefill.sent))
    for name in names:
        if name not in pair.decode.failed:
            assert pair.landed(*held[name])
    pair.assert_idle()


class Ranks:
    """Tensor-parallel P and D on one clock, each rank with its share of the heads."""

    def __init__(self, prefill_ranks, decode_ranks):
        self.clock = Clock()
        network = MemoryNetwork(self.clock)
        config = ExtraConfig()
        self.prefill = [
            FakeWorker("P", 40, network, config, rank=r, world_size=prefill_ranks)
            for r in range(prefill_ranks)
        ]
        self.decode = [
            FakeWorker("D", 50, network, config, rank=r, world_size=decode_ranks) for r in range(decode_ranks)
        ]
        whole = torch.randn(3, 40, 4, 2, 8, dtype=torch.float16)
        for worker in self.prefill:
            worker.storage.copy_(whole[:, :, :, worker.heads.start : worker.heads.stop])
        self.whole = whole
        self.directory = tuple(RankAddress(w.rank, "h", w.channel.port) for w in self.prefill)

    def order_all(self, target_ids=D_IDS):
        hold = Hold("a", "handle", 12, (GroupBlocks(0, 0, P_IDS),), 30)
        for worker in self.prefill:
            worker.mover.order(Orders(holds=(hold,), directory=self.directory), lambda: True)
        load = Load(
            "a", "handle", "P", "h", self.prefill[0].channel.port, 12, (GroupBlocks(0, 0, target_ids),)
        )
        for worker in self.decode:
            worker.mover.order(Orders(loads=(load,)), lambda: True)

    def run(self, seconds=0.0):
        for _ in range(12):
            for worker in (*self.prefill, *self.decode):
                worker.step(self.clock.now)
        self.clock.now += seconds


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1), (2, 2), (4, 2), (1, 4), (4, 1)])
def test_ranks_that_divide_heads_differently(prefill_ranks, decode_ranks):
    ranks = Ranks(prefill_ranks, decode_ranks)
    ranks.order_all()
    ranks.run()
    for worker in ranks.decode:
        expected = ranks.whole[:, list(P_IDS), :, worker.heads.start : worker.heads.stop]
        assert torch.equal(worker.storage[:, list(D_IDS)], expected)
        assert (worker.received, worker.failed) == (["a"], {})
    fetched = [
        worker for worker in ranks.prefill if worker.count("transfers", direction="sent", outcome="ok")
    ]
    for worker in fetched:
        assert worker.sent == ["a"]


def test_a_rank_is_served_once_while_another_is_still_to_come():
    ranks = Ranks(1, 2)
    ranks.order_all()
    for _ in range(6):
        ranks.prefill[0].step(ranks.clock.now)
        ranks.decode[0].step(ranks.clock.now)
    assert ranks.decode[0].received == ["a"]
    assert not ranks.prefill[0].sent, "rank 1 has not come yet"
    load = Load("b", "handle", "P", "h", ranks.prefill[0].channel.port, 12, (GroupBlocks(0, 0, D_IDS),))
    ranks.decode[0].mover.order(Orders(loads=(load,)), lambda: True)
    for _ in range(6):
        ranks.prefill[0].step(ranks.clock.now)
        ranks.decode[0].step(ranks.clock.now)
    assert ranks.decode[0].failed == {"b": "this rank has had this request"}
    ranks.run()
    assert ranks.decode[1].received == ["a"]
    assert ranks.prefill[0].sent == ["a"]


def test_blocks_stay_unused_as_long_as_a_correct_peer_may_write():
    """P goes on with what it was given time for, though nobody hears it; D must not free before that."""
    pair = Pair(ExtraConfig(max_batch_bytes=128, max_inflight_bytes=128))
    engine, wrote_at = pair.prefill.engine, []
    submit = engine.submit

    def slow_submit(batch):
        wrote_at.append(pair.clock.now)
        engine.delay_next(9)
        submit(batch)

    engine.submit = slow_submit
    start(pair)
    pair.run(1)
    pair.network.cut(pair.prefill.channel.port, pair.decode.channel.port)
    for _ in range(300):
        pair.run(0.5, step_s=0.5)
        if pair.decode.received:
            break
    assert pair.decode.received == ["a"]
    assert wrote_at[-1] < pair.clock.now - 9
    assert len(wrote_at) > 4


def hostile_pair():
    """A pair, and a stranger who is a peer of D's as well."""
    pair = Pair()
    pair.prefill.engine.hold()
    start(pair)
    pair.run(0.1)
    return pair


def test_only_the_peer_that_was_asked_can_answer():
    pair = hostile_pair()
    decode = pair.decode.mover.decode
    (leg,) = decode.loads["a"].legs.values()
    decode._written(Written(leg.transfer_id, True, True, 1, 1, 0.1, ""), "another link", pair.clock.now)
    pair.run()
    assert not pair.decode.received
    pair.prefill.engine.release()
    pair.run()
    assert pair.decode.received == ["a"]
    assert pair.landed(P_IDS, D_IDS)


@pytest.mark.parametrize(
    "groups",
    [
        (GroupBlocks(0, 0, D_IDS), GroupBlocks(0, 0, D_IDS)),
        (GroupBlocks(0, 0, tuple(range(1, 40))),),
        (GroupBlocks(7, 0, D_IDS),),
        (GroupBlocks(0, 2**40, D_IDS),),
        (GroupBlocks(0, 0, (2**40,)),),
        (GroupBlocks(0, 0, (-1,)),),
    ],
)
def test_a_fetch_of_nonsense_is_answered_and_takes_nobody_with_it(pair, groups):
    start(pair, "good", (7, 8), (30, 31))
    pair.hold("bad", P_IDS)
    pair.load("bad", D_IDS, groups=groups)
    pair.run(12)
    assert "good" in pair.decode.received
    assert "good" not in pair.decode.failed
    assert pair.landed((7, 8), (30, 31))


def test_a_batch_that_the_engine_does_not_take_fails_the_fetch(pair):
    def refuse(batch):
        raise RuntimeError("no")

    pair.prefill.engine.submit = refuse
    start(pair)
    pair.run()
    assert "does not take a batch: no" in pair.decode.failed["a"]
    assert pair.prefill.sent == ["a"]


def test_a_load_that_ends_makes_room_for_the_next_at_once():
    pair = Pair(ExtraConfig(max_loads=1))
    start(pair, "a", (1,), (10,))
    start(pair, "b", (2,), (11,))
    for _ in range(12):
        pair.prefill.step(pair.clock.now)
        sleep_s = pair.decode.mover.step(pair.clock.now)
        pair.decode.results.append(pair.decode.mover.take_results())
        if pair.decode.received == ["a"]:
            assert pair.decode.mover.decode.loads["b"].admitted
            assert sleep_s < 5
    assert sorted(pair.decode.received) == ["a", "b"]


def test_a_cancel_of_a_fetch_that_never_came_is_answered(pair):
    start(pair)
    pair.run()
    prefill = pair.prefill.mover.prefill
    (link,) = prefill.visitors
    sent = []
    prefill._send = lambda to, data: sent.append(data) or True
    prefill._cancelled(link, prefill.visitors[link], 99, pair.clock.now)
    assert len(sent) == 1
    prefill._not_quiet[link, 98] = pair.clock.now + 10
    prefill._cancelled(link, prefill.visitors[link], 98, pair.clock.now)
    assert len(sent) == 1, "its last answer said that memory is not quiet, and that still holds"
