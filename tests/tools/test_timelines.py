"""Records of several workers become one trace: joined by request, and put on one clock."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.addresses import RankAddress
from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError
from kvconnect.peer.asking import Answered
from kvconnect.peer.description import read_answer
from kvconnect.peer.timeline_page import write_page
from kvconnect.timeline import Moment, Timeline
from kvconnect.tools import inspect_runner as runner
from kvconnect.tools.timelines import PHASES, TraceSpan, Worker, align, join, lanes
from kvconnect.tools.trace_file import slowest, trace

delays = st.floats(1e-6, 5.0)
ahead = st.floats(-1e5, 1e5).filter(lambda one: abs(one) > 20)


def load(handle, began_at, steps, chunks, transfer_id=1):
    """P's and D's records of a load, by one clock: each moment so much later than the one before it."""
    now, prefill, decode = began_at, [], []
    path = [(decode, Moment.LOAD_TAKEN, "d-" + handle, 0), (decode, Moment.FETCH_SENT, "", 0)]
    path += [(prefill, Moment.FETCH_RECEIVED, "", 0), (prefill, Moment.FETCH_BEGUN, "", chunks)]
    for chunk in range(chunks):
        path += [(prefill, moment, "", chunk) for moment in (Moment.PACKING, Moment.PACKED, Moment.SUBMITTED)]
        path += [(prefill, Moment.WRITTEN, "", chunk), (decode, Moment.LANDED, "", chunk)]
        path += [(decode, Moment.UNPACKING, "", chunk), (decode, Moment.UNPACKED, "", chunk)]
    path += [(prefill, Moment.ANSWER_SENT, "", 1), (decode, Moment.ANSWER_RECEIVED, "", 1)]
    path += [(decode, Moment.REPORTED, "d-" + handle, 1)]
    for (records, moment, request_id, number), step in zip(path, itertools.cycle(steps), strict=False):
        now += step
        records.append((now, moment, handle, request_id, transfer_id, number))
    return prefill, decode


loads = st.lists(
    st.tuples(delays, st.lists(delays, min_size=1, max_size=9), st.integers(0, 4)), min_size=1, max_size=4
)


def two_workers(given_loads):
    """P and D, on one clock, and how long each load took."""
    prefill, decode, lengths, began_at = [], [], [], 0.0
    for number, (gap_s, steps, chunks) in enumerate(given_loads):
        ours, theirs = load(f"h{number}", began_at + gap_s, steps, chunks, transfer_id=number)
        prefill += ours
        decode += theirs
        lengths.append(theirs[-1][0] - theirs[0][0])
        began_at = theirs[-1][0]
    return Worker("P", 0, prefill), Worker("D", 0, decode), lengths


@given(loads, ahead, st.booleans())
def test_clocks_are_aligned_so_that_no_message_comes_before_it_is_sent(given_loads, ahead, decode_first):
    prefill, decode, lengths = two_workers(given_loads)
    shifted = [(record[0] + ahead, *record[1:]) for record in prefill.records]
    workers = [replace(prefill, records=shifted), decode]
    aligned = align(workers[::-1] if decode_first else workers)
    times = {record[1:]: record[0] for worker in aligned for record in worker.records}
    for (moment, handle, _, transfer_id, number), at in times.items():
        reply = {Moment.FETCH_SENT: Moment.FETCH_RECEIVED, Moment.WRITTEN: Moment.LANDED}.get(moment)
        if reply is not None:
            assert times[reply, handle, "", transfer_id, number] >= at - 1e-6
    requests = join(aligned)
    assert [request.name for request in requests] == [f"d-h{number}" for number in range(len(lengths))]
    for request, length in zip(requests, lengths, strict=True):
        _, phases = request.load
        assert tuple(phases) == PHASES
        assert all(took >= 0 for took in phases.values())
        assert sum(phases.values()) == pytest.approx(length, abs=1e-6)


@given(loads)
def test_a_trace_has_every_moment_and_no_two_slices_of_a_track_overlap_in_part(given_loads):
    prefill, decode, _ = two_workers(given_loads)
    requests = join([prefill, decode])
    made = trace([prefill, decode], requests)
    tracks = {}
    for event in made["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            track = tracks.setdefault((event["pid"], event["tid"]), [])
            track.append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        for (_, before), (after, _) in itertools.pairwise(sorted(slices)):
            assert after >= before - 0.01
    named = {event["args"]["name"] for event in made["traceEvents"] if event["ph"] == "M"}
    assert {"P", "D", "transfer thread", "d-h0"} <= named
    json.dumps(made)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)).map(sorted).map(tuple), max_size=30))
def test_lanes_overlap_nowhere_and_are_as_few_as_can_be(intervals):
    placed = lanes(intervals)
    by_lane = {}
    for lane, interval in zip(placed, intervals, strict=True):
        by_lane.setdefault(lane, []).append(interval)
    for chosen in by_lane.values():
        for (_, before), (after, _) in itertools.pairwise(sorted(chosen)):
            assert after >= before
    at_once = [sum(began <= at < max(end, began) for began, end in intervals) for at, _ in intervals]
    assert len(by_lane) <= max(at_once, default=0) + sum(began == end for began, end in intervals)


def test_ranks_that_ask_under_one_number_are_told_apart_by_their_rank():
    """P's rank 1 is asked by D's ranks 0 and 1, both of which count their fetches alike."""
    seen = TraceSpan(-1, 1)
    sides = [
        Worker(f"D{rank}", rank, [(10 + rank / 2, Moment.FETCH_SENT, "h", "", 1, 1)], seen) for rank in (0, 1)
    ]
    sides[0].records.append((11.0, Moment.LANDED, "h", "", 1, 0))
    asked = [(510.6, Moment.FETCH_RECEIVED, "h", "", 1, 1), (510.1, Moment.FETCH_RECEIVED, "h", "", 1, 0)]
    written = (510.9, Moment.WRITTEN, "h", "", 1, 0)
    prefill = Worker("P1", 1, [*asked, written], TraceSpan(499, 501))
    aligned = align([*sides, prefill])
    # The clocks of D's ranks are one as far as anything shows. To which of them P wrote is not known.
    assert [worker.records for worker in aligned[:2]] == [worker.records for worker in sides]
    assert asked[0][0] - aligned[2].records[0][0] == pytest.approx((498 + 500.1) / 2)


def test_what_two_know_of_a_number_is_joined_and_the_first_is_believed_where_they_differ():
    assert TraceSpan(1, 4).also(TraceSpan(2, 8)) == TraceSpan(2, 4)
    assert TraceSpan(1, 2).also(TraceSpan(3, 4)) == TraceSpan(1, 2)
    assert (TraceSpan(2, 4).guess, TraceSpan(-1, 9).guess, TraceSpan().guess) == (3, 0, 0)


def test_a_request_that_a_half_knows_by_its_own_name_only_is_found_by_the_handle():
    queued = (1.0, Moment.QUEUED, "", "p", 0, 40)
    done = (2.0, Moment.COMPUTED, "h", "p", 0, 40)
    alone = (3.0, Moment.QUEUED, "", "q", 0, 40)
    requests = join([Worker("P", 0, [queued, done, alone])])
    assert [(request.handle, request.name) for request in requests] == [("h", "p"), ("q", "q")]
    assert requests[0].records == {0: [queued, done]}
    assert requests[0].load is None
    _, decode = load("h", 3.0, [1.0], 1)
    decode = [(*record[:3], record[3] and "z", *record[4:]) for record in decode]
    (loaded, _) = reversed(join([Worker("P", 0, [queued, done, alone]), Worker("D", 0, decode)]))
    assert loaded.name == "z p", "D's own name of it comes first"


def test_the_table_has_the_slowest_first_and_how_late_threads_were_meanwhile():
    quick, slow = load("a", 0.0, [0.001], 2), load("b", 10.0, [0.010], 2)
    late = (10.030, Moment.LATE, "", "", 0, 20_000)
    prefill = Worker("P", 0, sorted([*quick[0], *slow[0], late]))
    decode = Worker("D", 0, [*quick[1], *slow[1]])
    lines = slowest([prefill, decode], join([prefill, decode]), 10)
    assert lines[0].split() == ["load", *PHASES, "late", "request"]
    assert [line.split()[-1] for line in lines[1:]] == ["d-b", "d-a"]
    assert [float(line.split()[-2]) for line in lines[1:]] == [20.0, 0.0]
    times = [float(time) for time in lines[1].split()[:-2]]
    assert times[0] == pytest.approx(sum(times[1:]), abs=0.05)
    assert len(slowest([prefill, decode], join([prefill, decode]), 1)) == 2


def test_what_was_recorded_after_another_worker_was_read_is_left_out():
    prefill, decode = load("h", 0.0, [1.0], 1)
    # D was read when it had sent its fetch, P at the end of all.
    workers = align([Worker("D", 0, decode[:2], read_at=decode[1][0]), Worker("P", 0, prefill, read_at=99.0)])
    assert [record[1] for record in workers[0].records] == [Moment.LOAD_TAKEN, Moment.FETCH_SENT]
    assert not workers[1].records


def test_all_ranks_of_a_node_are_read_each_once(monkeypatch):
    asked = []

    def ask(extra, keyring, address, topic, kind, argument=""):
        asked.append((address[1], topic))
        timeline = Timeline()
        timeline.note(Moment.LATE)
        page = write_page(timeline, "P", address[1] - 5600, argument)
        return Answered(read_answer(page, kind), 0.0, 1.0)

    told = SimpleNamespace(directory=tuple(RankAddress(rank, "here", 5600 + rank) for rank in range(3)))
    monkeypatch.setattr(runner, "ask", ask)
    monkeypatch.setattr(runner, "describe", lambda *_: SimpleNamespace(value=told))
    workers = runner.read_workers(ExtraConfig(), None, ["here:5600", "here:5601"])
    assert [worker.name for worker in workers] == ["P rank 0", "P rank 1", "P rank 2"]
    assert all(worker.read_at >= worker.records[0][0] for worker in workers)
    assert {topic for _, topic in asked} == {"timeline"}
    with pytest.raises(ConfigError, match="the address is 'nowhere'"):
        runner.read_workers(ExtraConfig(), None, ["nowhere"])
