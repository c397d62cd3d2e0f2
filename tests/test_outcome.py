"""What became of a load: causes, who must act, and the one line of it."""

from __future__ import annotations

import msgspec
import pytest

from kvconnect.halves.inspection_page import write_inspection
from kvconnect.outcome import Actor, Cause, Outcome, Reason
from kvconnect.peer.inspection import Inspection
from kvconnect.transfer.orders import OrdersDraft
from tests.transfer.pair import D_IDS, Pair
from tests.transfer.ranks import Ranks
from tests.transfer.shapes import Model, same_blocks


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_says_who_must_act_and_survives_the_wire(cause):
    assert isinstance(cause.actor, Actor)
    reason = cause("x" * 10_000)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reason), type=Reason) == reason
    assert reason.after("it: ").cause is cause


def test_a_load_that_arrives_has_one_outcome_with_its_peer_tokens_bytes_and_time():
    pair = Pair()
    pair.start("a")
    pair.run(1)
    (outcome,) = pair.decode.transfers.decode.outcomes
    assert (outcome.request_id, outcome.peer, outcome.source) == (
        "a",
        f"prefill node P at h:{pair.prefill.channel.port}",
        "lease",
    )
    assert outcome.num_tokens == 12
    assert outcome.total_bytes == 3 * pair.prefill.cache.table.regions[0].page_bytes * 3
    assert 0 <= outcome.seconds < 1
    assert outcome.reason is None
    assert pair.decode.count("transfers", direction="received", outcome="ok") == 1
    assert "12 tokens" in str(outcome)


def test_a_load_that_fails_names_its_cause_once_in_the_log_and_in_the_metrics(caplog):
    pair = Pair(prefill_model="other")
    pair.start("a")
    pair.run(30, step_s=0.5)
    (outcome,) = pair.decode.transfers.decode.outcomes
    assert outcome.reason.cause is Cause.OTHER_IDENTITY
    assert pair.decode.count("failures", reason="other_identity") == 1
    lines = [record.getMessage() for record in caplog.records if "request a was not loaded" in record.message]
    assert len(lines) == 1
    assert lines[0].endswith(
        "kv_load_failure_policy (what fails like this is only counted from now on, as other_identity)"
    )


def test_a_client_that_leaves_is_no_failure(caplog):
    pair = Pair()
    pair.load("a", D_IDS)
    pair.settle()
    pair.abort("a")
    pair.run(30, step_s=0.5)
    (outcome,) = pair.decode.transfers.decode.outcomes
    assert outcome.reason.cause is Cause.ABORTED
    assert not pair.decode.count("failures", reason="aborted")


def test_a_server_of_many_ranks_that_dies_is_lost_once():
    shape = same_blocks(4)
    ranks = Ranks(Model({"full": 3}), shape, shape, 4, 4)
    ranks.prefilled("a", 11)
    ranks.fetched("a", 11)
    ranks.run_until_received(1)
    for worker in ranks.prefill:
        ranks.network.kill(worker.channel.port)
    ranks.run(30)
    assert sum(worker.count("failures", reason="peer_lost") for worker in ranks.decode) == 1


def test_the_line_of_a_failure_that_nobody_can_end_asks_nobody_to_act():
    outcome = Outcome("r", "P", ("h", 1), "name", 16, 0, 0.5, "", Cause.EVICTED("it was evicted"))
    lost = "request r was not loaded from prefill node P at h:1 by name after 500.0 ms"
    assert str(outcome) == f"{lost}: it was evicted [evicted]"


def test_a_request_that_the_scheduler_refuses_to_load_is_found_by_its_id():
    pair = Pair()
    draft = OrdersDraft([])
    draft.computed("cmpl-3", ("P", "h", 1), Cause.PARAMETERS("the handle is not signed"))
    pair.decode.order(draft.take())
    pair.run(1)
    worker = pair.decode
    page = write_inspection(worker.transfers, worker.metrics.timeline, {}, {}, "request mpl-3")
    (outcome,) = msgspec.msgpack.decode(page, type=Inspection).ended
    assert str(outcome).startswith(
        "request cmpl-3 was not loaded from prefill node P at h:1 by lease: the handle"
    )
    assert worker.count("failures", reason="parameters_refused") == 1


def test_what_became_of_one_request_is_asked_by_a_part_of_its_id():
    pair = Pair(prefill_model="other")
    for name in ("cmpl-1", "cmpl-2"):
        pair.load(name, D_IDS)
        pair.run(30, step_s=0.5)
    worker = pair.decode
    page = write_inspection(worker.transfers, worker.metrics.timeline, {}, {}, "request pl-2")
    found = msgspec.msgpack.decode(page, type=Inspection)
    (outcome,) = found.ended
    assert str(outcome).startswith("request cmpl-2 was not loaded from prefill node P at h:")
    assert found.is_last
    every = write_inspection(worker.transfers, worker.metrics.timeline, {}, {}, "0")
    assert len(msgspec.msgpack.decode(every, type=Inspection).ended) == 2
