"""Records of several workers become one trace: joined by request, and put on one clock."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.addresses import RankAddress
from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError
from kvconnect.peer.asking import Answered
from kvconnect.peer.description import read_answer
from kvconnect.peer.timeline_page import TimelinePage, write_page
from kvconnect.timeline import Moment, Timeline
from kvconnect.tools import inspect_runner as runner
from kvconnect.tools.timelines import PHASES, Worker, align, join, slowest, trace

delays = st.floats(1e-6, 5.0)
answers = st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 1e-3)), min_size=1, max_size=3)


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


def read(worker, ahead_s, answers):
    """The worker of a host so far ahead, whose clock is known by answers that were so long on each way."""
    records = [(record[0] + ahead_s, *record[1:]) for record in worker.records]
    low, high = max(ahead_s - back for _, back in answers), min(ahead_s + there for there, _ in answers)
    return Worker(worker.name, worker.rank, records, (low, high))


booted = st.integers(-100, 100).map(lambda days: days * 86400.0)


@given(loads, st.tuples(booted, booted), st.tuples(*[answers] * 4), st.permutations(range(4)))
def test_workers_are_put_on_one_clock_as_far_as_their_answers_tell(given_loads, hosts, ways, order):
    prefill, decode, lengths = two_workers(given_loads)
    sides = [(side, ahead_s) for ahead_s in hosts for side in (prefill, decode)]
    read_all = [read(side, ahead_s, way) for (side, ahead_s), way in zip(sides, ways, strict=True)]
    aligned = align([read_all[place] for place in order])
    errors = {}
    for place, worker in zip(order, aligned, strict=True):
        side, ahead_s = sides[place]
        shifts = [after[0] - before[0] for after, before in zip(worker.records, side.records, strict=True)]
        assert max(shifts) - min(shifts) < 1e-6
        errors.setdefault(ahead_s, []).append(shifts[0] - sides[order[0]][1])
    for ahead_s, found in errors.items():
        assert max(found) - min(found) < 1e-6, "workers of one host share its clock"
        # One way of the network at most.
        assert abs(found[0]) < (1e-6 if ahead_s == sides[order[0]][1] else 1e-3 + 1e-6)
    requests = join(aligned)
    assert [request.name for request in requests] == [f"d-h{number}" for number in range(len(lengths))]
    for request, length in zip(requests, lengths, strict=True):
        _, phases = request.load
        assert tuple(phases) == PHASES
        assert all(took >= 0 for took in phases.values())
        assert sum(phases.values()) == pytest.approx(length, abs=2e-3)


@given(loads)
def test_a_trace_has_every_moment_and_no_two_slices_of_a_track_overlap_in_part(given_loads):
    prefill, decode, _ = two_workers(given_loads)
    requests = join([prefill, decode])
    made = trace([prefill, decode], requests)
    tracks, begun, steps = {}, {}, 0
    for event in made["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            track = tracks.setdefault((event["pid"], event["tid"]), [])
            track.append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "be":
            key = event["pid"], event["cat"], event["id2"]["local"]
            if event["ph"] == "b":
                assert key not in begun, "the steps of a chunk follow one another"
                begun[key] = event
            else:
                before = begun.pop(key)
                assert before["name"] == event["name"]
                tracks.setdefault(key, []).append((before["ts"], event["ts"]))
                steps += 1
    assert not begun
    assert steps == 5 * sum(chunks for _, _, chunks in given_loads)
    for slices in tracks.values():
        for (_, before), (after, _) in itertools.pairwise(sorted(slices)):
            assert after >= before - 0.01
    named = {event["args"]["name"] for event in made["traceEvents"] if event["ph"] == "M"}
    assert {"P", "D", "transfer thread", "d-h0"} <= named
    threads = [event["tid"] for event in made["traceEvents"] if event["name"] == "thread_name"]
    assert len({0, *threads}) == 1 + len(threads), "to viewers, a thread's number is the machine's"
    json.dumps(made)


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


def test_each_page_bounds_how_far_a_workers_clock_is_ahead(monkeypatch):
    times = iter([(10.0, 2.0, 3.0, False), (12.0, 3.0, 4.5, True)])

    def ask(*_):
        clock_s, asked_at, answered_at, is_last = next(times)
        records = ((clock_s, Moment.LATE, "", "", 0, 0),)
        page = TimelinePage(engine_id="P", rank=0, clock_s=clock_s, is_last=is_last, records=records)
        return Answered(page, asked_at, answered_at)

    monkeypatch.setattr(runner, "ask", ask)
    assert runner.read_worker(ExtraConfig(), None, ("here", 5600)).ahead == (7.5, 8.0)


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
