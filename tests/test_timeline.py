"""What is recorded of requests: bounded, in the sequence of time, from both halves."""

from __future__ import annotations

import threading

import pytest

from kvconnect.errors import PeerError
from kvconnect.peer.description import read_answer
from kvconnect.peer.messages import Fetch
from kvconnect.peer.timeline_page import MOST_PER_PAGE, TimelinePage, write_page
from kvconnect.timeline import LATE_S, Moment, Timeline, Turns
from tests.transfer.pair import Clock, Pair

SENT = (Moment.PACKING, Moment.PACKED, Moment.SUBMITTED, Moment.WRITTEN)
RECEIVED = (Moment.LANDED, Moment.UNPACKING, Moment.UNPACKED)


def moments(worker):
    """What was recorded of the one load of a worker, each moment once, in its sequence."""
    return list(dict.fromkeys(record[1] for record in worker.metrics.timeline.records()))


def test_of_a_request_id_that_a_client_chose_only_so_much_is_kept():
    timeline = Timeline(Clock())
    timeline.note(Moment.HELD, request_id="r" * 100_000)
    timeline.take([(1.0, Moment.QUEUED, "", "q" * 100_000, 0, 7), (2.0, Moment.QUEUED, "", "short", 0, 8)])
    assert [record[3] for record in timeline.records()] == ["q" * 256, "short", "r" * 256]
    assert [record[5] for record in timeline.records()] == [7, 8, 0]


def test_the_oldest_records_go_and_those_of_another_part_take_their_place_in_time():
    clock = Clock()
    timeline = Timeline(clock, most=3)
    for number in range(5):
        clock.now += 1
        timeline.note(Moment.PACKED, number, handle="h", transfer_id=7)
    assert timeline.records()[0] == (1003.0, "packed", "h", "", 7, 2)
    assert [record[5] for record in timeline.records()] == [2, 3, 4]
    timeline.take([(1003.5, Moment.QUEUED, "h", "r", 0, 0)])
    assert [record[0] for record in timeline.records()] == [1003.5, 1004.0, 1005.0]


def test_records_are_read_while_another_thread_adds_some():
    timeline, stopping = Timeline(most=1000), threading.Event()

    def add():
        while not stopping.is_set():
            timeline.note(Moment.PACKED)

    thread = threading.Thread(target=add)
    thread.start()
    for _ in range(300):
        records = timeline.records()
        assert records == sorted(records)
    stopping.set()
    thread.join()


def test_a_turn_that_comes_late_or_takes_long_is_recorded_with_its_time():
    clock = Clock()
    timeline = Timeline(clock)
    turns = Turns(timeline)
    # begins so long after the last one ended, takes so long, and wants to sleep so long then
    for after_s, takes_s, sleep_s in (
        (0, 1e-4, 0.0),
        (LATE_S / 2, LATE_S / 2, 50e-6),
        (5e-3 + 50e-6, 1e-4, 0.0),
        (1e-4, 3e-3, 5.0),
        (2.0, 1e-4, 0.0),
    ):
        clock.now += after_s
        assert turns.begin() == clock.now
        clock.now += takes_s
        turns.end(sleep_s)
    assert [(record[1], record[5]) for record in timeline.records()] == [("late", 5000), ("slow", 3000)]


def test_a_load_is_recorded_on_both_sides_from_its_order_to_its_report():
    pair = Pair()
    pair.start()
    pair.run()
    assert pair.landed()
    assert moments(pair.prefill) == [
        *(Moment.HELD, Moment.FETCH_RECEIVED, Moment.FETCH_BEGUN, Moment.PACKING, Moment.PACKED),
        *(Moment.SUBMITTED, Moment.WRITTEN, Moment.ANSWER_SENT, Moment.LEASE_ENDED),
    ]
    assert moments(pair.decode) == [
        # The first chunk is unpacked while P packs the next one.
        *(Moment.LOAD_TAKEN, Moment.FETCH_SENT, Moment.LANDED, Moment.UNPACKING),
        *(Moment.UNPACKED, Moment.ANSWER_RECEIVED, Moment.REPORTED),
    ]
    (fetch,) = pair.network.heard(Fetch)
    chunks = list(range(len(fetch.chunks)))
    for worker, each in ((pair.prefill, SENT), (pair.decode, RECEIVED)):
        records = worker.metrics.timeline.records()
        assert {record[2] for record in records} == {fetch.handle}, "all of it is found by its handle"
        for moment in each:
            assert sorted(record[5] for record in records if record[1] == moment) == chunks


def test_pages_have_every_record_once_and_no_handle():
    timeline = Timeline()
    for number in range(MOST_PER_PAGE + 10):
        timeline.note(Moment.PACKED, number, handle="secret", request_id="r" * 1000, transfer_id=3)
    timeline.note(Moment.REPORTED, True, handle="secret")
    first = read_answer(write_page(timeline, "P", 1, ""), TimelinePage)
    second = read_answer(write_page(timeline, "P", 1, repr(first.records[-1][0])), TimelinePage)
    assert (first.is_last, second.is_last, first.engine_id, first.rank) == (False, True, "P", 1)
    records = first.records + second.records
    assert [record[5] for record in records] == [*range(MOST_PER_PAGE + 10), 1]
    assert [record[0] for record in records] == [record[0] for record in timeline.records()]
    (handle,) = {record[2] for record in records}
    assert handle != "secret"
    assert b"secret" not in write_page(timeline, "P", 1, "")
    assert second.clock_s >= records[-1][0]
    with pytest.raises(PeerError, match="cannot be read"):
        read_answer(b"\xc1", TimelinePage)


def test_the_latest_records_are_those_that_happened_last():
    clock = iter(range(100))
    timeline = Timeline(lambda: next(clock), most=50)
    for number in range(100):
        timeline.note("n", number)
    assert [record[5] for record in timeline.latest(3)] == [99, 98, 97]
    assert len(timeline.latest(1000)) == 50
