"""What an operator reads of a failure: one line for one cause, with the requests and what becomes of them."""

from __future__ import annotations

import pytest

from kvconnect.config import ExtraConfig
from tests.transfer.pair import Pair
from tests.transfer.ranks import Ranks
from tests.transfer.shapes import Model, same_blocks

REQUESTS = [f"r{number}" for number in range(12)]


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def all_fail(pair: Pair, names=REQUESTS) -> None:
    for number, name in enumerate(names):
        pair.load(name, (1 + number,))
    pair.run(15, step_s=0.25)
    assert set(names) <= pair.decode.failed.keys()


def test_twelve_requests_that_wait_for_an_unreachable_peer_are_one_line(caplog):
    pair = Pair()
    pair.cut()
    all_fail(pair)
    (line,) = warnings(caplog)
    assert line.startswith("12 requests were not loaded from prefill node P at h:1 after 5")
    assert "did not answer the greeting within 5 s, half of peer_timeout_s [peer_out_of_reach; " in line
    assert "must act: start it; check host, port and the firewall" in line
    assert "; r0, r1, r2 and 9 more are computed here, or end with an error, by kv_load_failure" in line
    assert "(" in line
    assert "('" not in line, "no tuple"


def test_an_outage_is_one_line_however_often_it_is_tried_and_the_next_one_another(caplog):
    pair = Pair()
    pair.start("before", (1,), (1,), run_s=1)
    for outage in (1, 2):
        pair.cut()
        all_fail(pair, [f"{outage} {name}" for name in REQUESTS])
        pair.run(60, step_s=0.25)
        all_fail(pair, [f"{outage} later {name}" for name in REQUESTS])
        assert len(warnings(caplog)) == outage
        pair.mend()
        pair.run(ExtraConfig().retry_max_s + 6, step_s=0.25)
        pair.start(f"after {outage}", (2,), (2,), run_s=1)
        assert f"after {outage}" not in pair.decode.failed
    assert len(warnings(caplog)) == 2


def test_a_peer_that_dies_with_twelve_requests_under_way_is_one_line_of_each_side(caplog):
    pair = Pair()
    for number, name in enumerate(REQUESTS):
        pair.start(name, (1 + number,), (1 + number,))
    pair.prefill.engine.hold()
    pair.run(0.2)
    pair.network.kill(pair.prefill.channel.port)
    pair.run(1)
    assert len(pair.decode.failed) == 12
    ours = [line for line in warnings(caplog) if "decode node" not in line]
    assert len(ours) == 1
    assert "12 requests were not loaded" in ours[0]
    assert "nothing listens at h:1, the prefill node is gone [lost_with_peer" in ours[0]


def test_an_idle_peer_that_dies_fails_no_request(caplog):
    pair = Pair()
    pair.start("a", (1,), (1,), run_s=1)
    pair.network.kill(pair.prefill.channel.port)
    pair.run(60, step_s=0.5)
    (line,) = warnings(caplog)
    assert line.startswith("prefill node P at h:1: nothing listens at h:1")
    assert line.endswith("; no request waits for it")


def test_a_refusal_is_one_line_of_each_side(caplog):
    pair = Pair(prefill_model="other")
    all_fail(pair)
    pair.run(30, step_s=0.25)
    all_fail(pair, ["x", "y"])
    sides = [line.split(" were ")[0].split(" was ")[0] for line in warnings(caplog)]
    assert sorted(sides) == ["12 requests", "rank 0 of decode node D at 127.0.0.1"]
    for line in warnings(caplog):
        assert "model is other on the prefill node, m on the decode node (--model)" in line
        assert "[other_identity; the operator of the two nodes must act: " in line


def test_leases_that_no_decode_node_fetches_are_one_line_until_one_is_fetched(caplog):
    pair = Pair()
    for number, name in enumerate(REQUESTS):
        pair.hold(name, (1 + number,))
        pair.run(1)
    pair.run(40, step_s=0.5)
    assert pair.prefill.count("failures", reason="lease_expired") == 12
    (line,) = warnings(caplog)
    assert "request r0 was not fetched, its blocks are freed: its lease_s of 30 s is over" in line
    pair.start("a", (1,), (1,), run_s=1)
    pair.hold("b", (2,))
    pair.run(40, step_s=0.5)
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize("dies", ["all", "rank 2"])
def test_a_server_of_many_ranks_is_one_line_and_a_rank_that_only_one_met_another(caplog, dies):
    ranks = Ranks(Model({"full": 3}), same_blocks(4), same_blocks(4), 4, 4)
    ranks.prefilled("a", 11)
    ranks.fetched("a", 11)
    ranks.run_until_received(1)
    for worker in ranks.prefill if dies == "all" else ranks.prefill[2:3]:
        ranks.network.kill(worker.channel.port)
    for name in "bc":
        ranks.fetched(name, 11)
    ranks.run(30)
    reached = [line for line in warnings(caplog) if "nothing listens at" in line]
    assert len(reached) == 1


def test_a_peer_with_two_causes_has_a_line_for_each(caplog):
    pair = Pair()
    pair.start("a", (1,), (1,))
    pair.load("unknown", (2,))
    pair.run(40, step_s=0.5)
    pair.network.kill(pair.prefill.channel.port)
    pair.load("late", (3,), run_s=3)
    causes = [line.partition("[")[2].partition(";")[0] for line in warnings(caplog) if "not loaded" in line]
    assert causes == ["not_held", "lost_with_peer"]


def test_a_client_of_unreadable_messages_is_one_line(caplog):
    pair = Pair()
    for number in range(5):
        link = f"in:{pair.decode.channel.port}:{number}"
        pair.prefill.transfers.inbound_peers.receive(link, b"nonsense", 0.0, "10.0.0.9")
    (line,) = warnings(caplog)
    assert line.startswith("a message of a client at 10.0.0.9 was dropped: ")
    assert pair.prefill.count("failures", reason="peer_message") == 5
