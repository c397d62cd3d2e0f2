"""The store tier over a store of a test's own: the same contract without the library, and odd processes."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.engine.store_process import Verb
from kvconnect.errors import EngineError
from kvconnect.offload.record import RecordFormat
from kvconnect.offload.store.store_tier import Announced, StoreTier
from kvconnect.offload.tier import TierRow
from tests.offload.tier_suite import (
    LowerTierSuite,
    TierDriver,
    blank_rows,
    lengths_of,
    rows_of,
    some_rows,
    until,
)

NAMESPACE = "ab" * 32


class FakeStore:
    """What every process of one store sees."""

    def __init__(self):
        self.values = {}
        self.processes = []
        self.refuses_to_start = 0
        self.may_start = threading.Event()
        self.may_start.set()

    def start(self, memory):
        assert self.may_start.wait(10)
        if self.refuses_to_start:
            self.refuses_to_start -= 1
            raise EngineError("there is no master")
        self.processes.append(FakeProcess(self, memory))
        return self.processes[-1]


class FakeProcess:
    """``trouble``, by verb: an error to raise, or a code for every key."""

    def __init__(self, store, memory):
        self.store, self.memory = store, memory
        self.trouble = {}
        self.orders = []
        self.dead = self.killed = self.closed = False

    def ask(self, lane, order, timeout_s):
        if self.dead:
            raise EngineError("it is dead")
        self.orders.append(order.verb)
        trouble = self.trouble.get(order.verb)
        if isinstance(trouble, threading.Event):
            if not trouble.wait(timeout_s):
                raise EngineError("it did not answer")
        elif isinstance(trouble, Exception):
            raise trouble
        elif trouble is not None:
            return (trouble,) * len(order.keys)
        return tuple(self.do(order))

    def do(self, order):
        values, view = self.store.values, self.memory.view
        places = list(zip(order.keys, order.offsets, order.lengths, strict=False))
        match order.verb:
            case Verb.PUT:
                for key, offset, length in places:
                    values.setdefault(key, bytes(view[offset : offset + length]))
                return [0] * len(places)
            case Verb.GET:
                return [self.get(*place) for place in places]
            case Verb.EXIST:
                return [int(key in values) for key in order.keys]
            case Verb.REMOVE:
                return [0 if values.pop(key, None) is not None else -704 for key in order.keys]
            case Verb.CLEAR:
                for key in [key for key in values if key.startswith(order.keys)]:
                    del values[key]
                return [1]
            case Verb.CLOSE:
                return [0]

    def get(self, key, offset, length):
        value = self.store.values.get(key)
        if value is None:
            return -704
        if len(value) > length:
            return -600
        self.memory.view[offset : offset + len(value)] = value
        return len(value)

    def kill(self):
        self.dead = self.killed = True

    def close(self):
        self.dead = self.closed = True


def key_of(tier, content):
    """The name under which a store has a content."""
    return tier._keys(blank_rows({content: 1}))[0]


@pytest.fixture
def store():
    return FakeStore()


@pytest.fixture
def make(store):
    made = []

    def make(**settings):
        given = {"max_queued_bytes": 1 << 30, "batch_bytes": 1 << 16, "retry_s": (0.01, 0.05), **settings}
        made.append(StoreTier(store.start, NAMESPACE, **given))
        return made[-1], TierDriver(made[-1])

    yield make
    for tier in made:
        assert tier.close()
    assert all(process.closed for process in store.processes)


class TestStoreTierOverAFake(LowerTierSuite):
    indexed = False

    def make_tier(self, tmp_path):
        return StoreTier(FakeStore().start, NAMESPACE, max_queued_bytes=self.queue_bytes, batch_bytes=1 << 21)


VERBS = {"write": Verb.PUT, "read": Verb.GET, "seek": Verb.EXIST, "clear": Verb.CLEAR}
REASONS = {-200: "store_full", -600: "store_wrong_size", -800: "store_io"}
TROUBLES = [None, None, None, EngineError("broken"), RuntimeError("a bug"), "hang", -900, *REASONS]
steps = st.tuples(
    st.sampled_from(["write", "write", "read", "seek", "clear", "spoil"]),
    st.sampled_from(TROUBLES),
    st.sets(st.integers(0, 7), min_size=1),
    st.integers(0, 2),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, max_size=12))
def test_whatever_its_process_does_a_tier_has_what_was_written_and_announces_what_it_saw(steps):
    """A step has a trouble; after one that loses the process some starts are refused."""
    store = FakeStore()
    times = {"retry_s": (0.001, 0.002), "call_timeout_s": 0.05}
    tier = StoreTier(store.start, NAMESPACE, max_queued_bytes=1 << 30, batch_bytes=1 << 16, **times)
    tier.announce()
    driver, everything = TierDriver(tier), list(some_rows(8, 1).items())
    model, announced = {}, set()
    assert driver.seek([everything[0][0]]) == set()
    for what, trouble, chosen, refused in steps:
        rows, process, failures = dict(everything[at] for at in chosen), store.processes[-1], Counter()
        if what == "spoil":
            trouble = None
            for content in list(rows.keys() & model.keys())[:1]:
                key = key_of(tier, content)
                store.values[key] = store.values[key][:-1] + bytes([store.values[key][-1] ^ 1])
                del model[content]
                failures["store_corrupt"] = 1
        else:
            store.refuses_to_start = refused
            process.trouble[VERBS[what]] = threading.Event() if trouble == "hang" else trouble
        is_lost = trouble is not None and (what == "clear" or trouble not in REASONS)
        there = {} if trouble is not None else {one: model[one] for one in rows.keys() & model.keys()}
        if trouble in REASONS and what in ("write", "read"):
            failures[REASONS[trouble]] = len(rows)
        match what:
            case "write":
                failed = driver.write(rows)
                assert set(failed) == (set() if trouble is None else set(rows))
                if not failed:
                    model |= rows
                    announced |= rows.keys()
            case "read" | "spoil":
                assert driver.read(lengths_of(rows)) == there
                announced = announced - rows.keys() | there.keys()
            case "seek":
                # What is sought has no tokens to announce yet.
                assert driver.seek(list(rows)) == there.keys()
                announced -= rows.keys() - there.keys()
            case "clear":
                # Weights may have changed since what was kept before.
                tier.clear()
                driver.index.clear()
                model, announced = {}, set()
                assert driver.seek(list(rows)) == set()
                assert driver.read(lengths_of(rows)) == {}
                failures["store_not_cleared"] = int(trouble in REASONS)
        if is_lost:
            until(lambda process=process: tier._link.process not in (process, None))
            assert process.killed
            announced = set()
            failures["store_unreachable"] = 1 + refused
            failures["store_internal"] = int(isinstance(trouble, RuntimeError))
        until(lambda: tier._cleared == tier.tracker.epoch)
        assert len(store.values) == len(model)
        process.trouble.clear()
        driver.poll()
        assert Counter(driver.failures) == failures
        assert driver.index == announced
        driver.failures.clear()
    assert tier.close()


def test_orders_wait_for_the_first_start(store, make):
    store.may_start.clear()
    _, driver = make()
    rows = some_rows(5, 1)
    assert driver.write({}) == ()
    threading.Timer(0.1, store.may_start.set).start()
    assert driver.write(rows) == ()
    assert driver.read(lengths_of(rows)) == rows


def test_a_store_that_cannot_be_started_is_tried_again_when_it_is_asked(store, make):
    store.refuses_to_start = 3
    _, driver = make()
    rows = some_rows(5, 2)
    assert set(driver.write(rows)) == set(rows)
    until(lambda: driver.write(rows) == ())
    assert driver.failures == {"store_unreachable": 3}
    assert driver.read(lengths_of(rows)) == rows


def test_closing_does_not_wait_for_a_start(store, make):
    store.may_start.clear()
    tier, driver = make()
    rows = some_rows(5, 3)
    call = driver.begin("write", rows_of(rows))

    def start_late():
        until(lambda: tier.state()["link"] == "closed")
        store.may_start.set()

    threading.Thread(target=start_late).start()
    assert tier.close()
    assert set(driver.wait(call)) == set(rows)
    assert set(driver.write(rows)) == set(rows)


def test_long_calls_go_in_batches(store, make):
    _, driver = make(batch_bytes=1 << 14)
    rows = some_rows(40, 8, length=3000)
    assert driver.write(rows) == ()
    assert store.processes[0].orders.count(Verb.PUT) >= 8
    assert driver.read(lengths_of(rows)) == rows


def test_rows_that_are_being_copied_when_the_store_is_cleared_are_not_kept(store, make, monkeypatch):
    tier, driver = make()
    rows, header, cleared = some_rows(3, 12), RecordFormat.header, []

    def while_copying(self, *what):
        if not cleared:
            cleared.append(True)
            tier.clear()
        return header(self, *what)

    monkeypatch.setattr(RecordFormat, "header", while_copying)
    assert set(driver.write(rows)) == set(rows)
    until(lambda: Verb.CLEAR in store.processes[0].orders)
    assert Verb.PUT not in store.processes[0].orders


def test_rows_for_a_store_that_is_down_are_not_copied(store, make, monkeypatch):
    tier, driver = make(retry_s=(60.0, 60.0))
    store.refuses_to_start = 1
    until(lambda: tier.state()["link"] == "down" or store.processes)
    with tier._link.changed:
        tier._link._lose("a test")
    copied = []
    monkeypatch.setattr(RecordFormat, "header", lambda *_: copied.append(True))
    rows = some_rows(3, 13)
    assert set(driver.write(rows)) == set(rows)
    assert not copied


def test_what_waits_to_be_written_at_a_clear_is_not_written(store, make):
    tier, driver = make()
    first, waiting, later = some_rows(1, 20), some_rows(3, 21), some_rows(1, 22)
    assert driver.seek(list(first)) == set()
    held = store.processes[0].trouble[Verb.PUT] = threading.Event()
    for rows in (first, waiting):
        call = driver.begin("write", rows_of(rows))
        until(lambda: Verb.PUT in store.processes[0].orders)
    tier.clear()
    held.set()
    assert driver.write(later) == ()
    assert set(driver.wait(call)) == set(waiting)
    assert driver.seek([*first, *waiting, *later]) == set(later)


def test_who_reads_during_a_clear_finds_nothing(store, make):
    tier, driver = make()
    rows = some_rows(3, 23)
    assert driver.write(rows) == ()
    held = store.processes[0].trouble[Verb.CLEAR] = threading.Event()
    tier.clear()
    call = driver.begin("seek", [TierRow(*content) for content in rows])
    assert driver.read(lengths_of(rows)) == {}
    assert driver.wait(call) == ()
    held.set()


def test_the_queue_is_free_again_once_it_was_written(store, make):
    _, driver = make(max_queued_bytes=10_000)
    for seed in range(8):
        assert driver.write(some_rows(3, 30 + seed, length=3000)) == ()
    assert driver.tier.state()["queued_bytes"] == 0


def test_no_bit_of_a_value_can_turn_without_being_noticed(store, make):
    _, driver = make()
    rows = some_rows(1, 16, length=200) | some_rows(1, 17, length=200)
    assert driver.write(rows) == ()
    wanted = lengths_of(rows)
    first, second = store.values
    whole = store.values[first]
    for bit in range(0, 8 * len(whole), 7):
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        store.values[first] = bytes(spoilt)
        found = driver.read(wanted)
        assert len(found) == 1
        assert found.items() <= rows.items()
        assert first not in store.values
    for odd in (b"", whole[:-1], whole + b"\0", store.values[second]):
        store.values[first] = odd
        assert len(driver.read(wanted)) == 1
    turned = len(range(0, 8 * len(whole), 7))
    assert driver.failures["store_wrong_size"] == 3
    assert driver.failures["store_corrupt"] == turned + 1


def test_the_process_is_told_when_it_is_closed(store, make):
    tier, driver = make()
    assert driver.write(some_rows(1, 14)) == ()
    assert tier.close()
    assert store.processes[0].orders[-1] is Verb.CLOSE


def test_a_store_of_which_nothing_is_to_be_announced_reports_nothing(make):
    tier, driver = make()
    assert driver.write(some_rows(6, 1)) == ()
    assert driver.index == set()
    assert not tier.tracker._seen


def test_what_is_announced_of_a_store_has_a_bound():
    announced = Announced()
    announced.most = 3
    contents = [(0, bytes([at])) for at in range(5)]
    announced.there(contents[:3])
    assert announced.take().changed(True) == contents[:3]
    announced.there(contents[:1])
    assert announced.take().changed(True) == contents[:1], "another rank may have missed it since"
    announced.there(contents[3:])
    update = announced.take()
    assert update.changed(True) == contents[3:]
    assert set(update.changed(False)) == set(contents[1:3])
    announced.gone(contents)
    assert set(announced.take().changed(False)) == {contents[0], *contents[3:]}


@pytest.mark.parametrize(
    ("code", "reason"),
    [(-200, "store_full"), (-800, "store_io"), (-600, "store_wrong_size"), (-900, "store_unreachable")],
)
def test_codes_are_misses_and_counted_by_reason(store, make, code, reason):
    _, driver = make()
    rows = some_rows(5, 7)
    assert driver.write(rows) == ()
    for process in store.processes:
        process.trouble = {Verb.PUT: code, Verb.GET: code}
    assert driver.read(lengths_of(rows)) == {}
    assert driver.failures == {reason: 1 if code == -900 else 5}


def test_what_is_announced_is_what_the_store_was_seen_to_have(store, make):
    """Written or read, and until it is missed, spoilt or cleared, or the store is lost."""
    tier, driver = make()
    tier.announce()
    rows, others = some_rows(6, 1), some_rows(3, 2)
    assert driver.write(rows) == ()
    assert driver.index == set(rows)
    store.values.update(
        {
            key_of(tier, content): tier._format.header(content, memoryview(row)) + row
            for content, row in others.items()
        }
    )
    assert driver.seek(list(others)) == set(others)
    assert driver.index == set(rows), "what is sought has no tokens yet"
    assert driver.read(lengths_of(others)) == others
    assert driver.index == {*rows, *others}
    first, second, *_ = rows
    del store.values[key_of(tier, first)]
    driver.seek(list(rows))
    assert driver.index == {*rows, *others} - {first}, "it was asked for and is gone"
    key = key_of(tier, second)
    store.values[key] = store.values[key][:-1] + b"?"
    assert second not in driver.read(lengths_of(rows))
    assert driver.index == {*rows, *others} - {first, second}, "it is spoilt"
    store.processes[-1].dead = True
    driver.seek(list(rows))
    until(lambda: driver.poll() is not None and driver.index == set())
    until(lambda: tier.state()["link"] == "up" or driver.seek(list(rows)) is None)
    assert driver.write(some_rows(4, 5)) == ()
    assert driver.index == set(some_rows(4, 5))
    tier.clear()
    driver.index.clear()
    assert driver.write(rows) == ()
    assert driver.index == set(rows)
