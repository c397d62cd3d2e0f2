"""Pins of sessions: nothing of them makes room before its time, quotas hold, and others go on."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvconnect.offload.index.budgets import plan_arena
from kvconnect.offload.index.session_pins import MOST_PINNED, MOST_SESSIONS, SessionPins
from kvconnect.offload.index.tier_index import ContentState, TierIndex
from kvconnect.offload.tier import DISK, HOST
from tests.offload.half_kit import check_index, num_ready
from tests.offload.test_index import GROUPS, PLAN, names

SHARE = 0.4
DISK_BYTES = 100 * 8192
DISK_ROWS = {group: 100 / 52 * limit for group, limit in PLAN.limits.items()}
TENANTS = ("a", "b", "c")
ABSENT, PENDING, READY = ContentState


def quota(limit: float, share: float = SHARE) -> int:
    return int(limit * share)


class PinMachine(RuleBasedStateMachine):
    """Sessions of tenants pin parts of sequences, while others store several times what there is room for."""

    tenants = st.sampled_from(TENANTS)
    sessions = st.sampled_from(("s", "t"))
    groups = st.sampled_from(GROUPS)
    sequences = st.integers(0, 3)
    counts = st.integers(0, 30)

    @initialize()
    def start(self):
        self.index = TierIndex(PLAN)
        self.pins = SessionPins(self.index, PLAN, SHARE, DISK_BYTES)
        self.now, self.fresh = 0.0, 100
        self.running = []
        self.pending = []
        self.on_disk = {}
        for group in GROUPS:
            self.store(group, names(0, 0, 8))

    def store(self, group, hashes, fails=False):
        taken, _ = self.index.reserve(group, hashes)
        if fails:
            self.index.drop(group, taken)
        else:
            self.index.commit(group, taken)
        return taken

    @rule(group=groups, sequence=sequences, count=counts, fails=st.booleans())
    def request(self, group, sequence, count, fails):
        self.store(group, names(sequence, 0, count), fails)

    @rule(group=groups, sequence=sequences, count=counts)
    def begin_to_store(self, group, sequence, count):
        self.pending.append((group, self.index.reserve(group, names(sequence, 0, count))[0]))

    @precondition(lambda self: self.pending)
    @rule(fails=st.booleans())
    def end_to_store(self, fails):
        group, taken = self.pending.pop(0)
        (self.index.drop if fails else self.index.commit)(group, taken)
        for pin in self.every() if fails else ():
            assert not pin.held.get((HOST, group), {}).keys() & set(taken)

    @rule(group=groups, times=st.integers(1, 3))
    def pressure(self, group, times):
        """Another part than what is pinned is stored, of three times all that there is."""
        rows = self.index.classes[PLAN.class_of[group]]
        stay = [pins or state == PENDING for pins, state in zip(rows.pins, rows.state, strict=True)]
        free = rows.num_rows - sum(map(bool, stay))
        for _ in range(times):
            self.fresh += 1
            taken = self.store(group, names(self.fresh, 0, rows.num_rows))
            assert len(taken) == free
            assert free >= rows.num_rows * (1 - MOST_PINNED) - 1 or self.pending

    @rule(tenant=tenants, session=sessions, sequence=sequences, count=counts)
    def begin(self, tenant, session, sequence, count):
        self.running.append((self.pins.begin(tenant, session, names(sequence, 0, count)), sequence, count))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tier=st.sampled_from((HOST, DISK)))
    def add(self, data, tier):
        pin, sequence, count = data.draw(st.sampled_from(self.running))
        for group in GROUPS:
            part = names(sequence, 0, count)
            added = self.pins.add(pin, (tier, group), part)
            held = pin.held.get((tier, group), {})
            assert added == next((at for at, name in enumerate(part) if name not in held), len(part))
            is_absent = tier == HOST and added < len(part) and not self.index.has(group, [part[added]])[0]
            if added < len(part) and not is_absent and pin in self.every():
                # There is no room for one more: its tenant's quota is used up, or that of all together.
                limit, every = (PLAN.limits if tier == HOST else DISK_ROWS)[group], self.held((tier, group))
                own = every.get(pin.tenant, set())
                assert part[added] not in own
                assert len(own) == quota(limit) or len(set().union(*every.values())) == quota(
                    limit, MOST_PINNED
                )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ttl_s=st.integers(1, 50))
    def end(self, data, ttl_s):
        entry = data.draw(st.sampled_from(self.running))
        self.running.remove(entry)
        pin, sequence, count = entry
        held = len(pin.held.get((HOST, 0), {}))
        pin.end = (held, names(sequence, 0, count)[held - 1]) if 0 < held <= count else (0, b"")
        self.pins.end(pin, self.now + ttl_s)

    @rule(tenant=tenants, session=sessions)
    def release(self, tenant, session):
        for pin in self.pins.of(tenant, session):
            self.pins.release(pin)
            assert not any(pin.held.values())
        assert not self.pins.of(tenant, session)

    @rule(group=groups, sequence=sequences, first=st.integers(0, 20), count=st.integers(0, 5))
    def fails_to_be_restored(self, group, sequence, first, count):
        lost = names(sequence, first, count)
        states = self.index.states(group, lost)
        lost = [name for name, state in zip(lost, states, strict=True) if state is READY]
        self.index.drop(group, lost)
        for pin in self.every():
            assert not pin.held.get((HOST, group), {}).keys() & set(lost)

    @rule(seconds=st.integers(0, 40))
    def later(self, seconds):
        before = self.every()
        self.now += seconds
        self.pins.expire(self.now)
        assert set(self.every()) == {pin for pin in before if pin.deadline > self.now}

    @rule()
    def reset(self):
        self.pins.clear()
        self.index.clear()
        self.on_disk.clear()
        assert not self.every()

    def every(self):
        return [pin for tenant in TENANTS for session in "st" for pin in self.pins.of(tenant, session)]

    def held(self, place):
        """What is pinned in a place, by tenant."""
        held: dict = {}
        for pin in self.every():
            held.setdefault(pin.tenant, set()).update(pin.held.get(place, ()))
        return held

    @invariant()
    def what_is_pinned_is_there_and_within_its_quota(self):
        check_index(self.index)
        for name, is_pinned in self.pins.disk_changes.items():
            assert self.on_disk.pop(name, False) is not is_pinned
            if is_pinned:
                self.on_disk[name] = True
        self.pins.disk_changes.clear()
        held = {(tier, group): self.held((tier, group)) for tier in (HOST, DISK) for group in GROUPS}
        for group in GROUPS:
            rows, place = self.index.classes[PLAN.class_of[group]], (HOST, group)
            pinned = set().union(*held[place].values())
            assert ABSENT not in self.index.states(group, sorted(pinned))
            marked = [rows.content[row] for row, pins in enumerate(rows.pins) if pins]
            assert {name for own, name in marked if own == group} == pinned
        for tier, limits in ((HOST, PLAN.limits), (DISK, DISK_ROWS)):
            for group in GROUPS:
                by_tenant = held[tier, group]
                assert all(len(own) <= quota(limits[group]) for own in by_tenant.values())
                every = set().union(*by_tenant.values())
                assert self.pins.counts()[tier, group] == len(every) <= quota(limits[group], MOST_PINNED)
        on_disk = {
            (group, name)
            for (tier, group), by in held.items()
            if tier == DISK
            for name in set().union(*by.values())
        }
        assert self.on_disk.keys() == on_disk


TestPins = PinMachine.TestCase
TestPins.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def plan():
    return plan_arena(64 * 1000, {0: 64}, {0: 1.0})


def filled(plan, sequences):
    index = TierIndex(plan)
    for sequence in range(sequences):
        taken, _ = index.reserve(0, names(sequence, 0, 100))
        index.commit(0, taken)
    return index


def test_the_next_turn_continues_the_pin_and_another_prompt_has_its_own(plan):
    index = filled(plan, 4)
    pins = SessionPins(index, plan, 0.25)
    pin = pins.begin("", "s", names(1, 0, 40))
    assert pins.add(pin, (HOST, 0), names(1, 0, 40)) == 40
    pin.end = 40, names(1, 39, 1)[0]
    pins.end(pin, 10.0)
    assert pins.begin("", "s", names(2, 0, 60)) is not pin
    assert pins.begin("other", "s", names(1, 0, 60)) is not pin
    assert pins.begin("", "s", names(1, 0, 60)) is pin
    # While that runs it never ends, and a request beside it has a pin of its own.
    pins.expire(1e9)
    assert pins.begin("", "s", names(1, 0, 60)) is not pin
    assert num_ready(index, 0, names(1, 0, 40)) == 40
    pins.end(pin, 2e9)
    assert pin in pins.of("", "s")


def test_a_session_is_renewed_and_has_a_bounded_number_of_prompts(plan):
    index = filled(plan, 1)
    pins = SessionPins(index, plan, 0.25)
    for turn in range(1000):
        pin = pins.begin("", "s", names(0, 0, 20))
        pins.add(pin, (HOST, 0), names(0, 0, 20))
        pin.end = 20, names(0, 19, 1)[0]
        pins.end(pin, 1000.0 + turn)
    assert len(pins.of("", "s")) == 1
    # A session has so many prompts that have nothing in common, and no more.
    for sequence in range(100):
        index.commit(0, index.reserve(0, names(sequence, 0, 2))[0])
        pin = pins.begin("", "s", names(sequence, 0, 2))
        pins.add(pin, (HOST, 0), names(sequence, 0, 2))
        pins.end(pin, 3000.0 + sequence)
    assert len(pins.of("", "s")) == 16


def test_what_is_not_over_yet_costs_a_step_nothing():
    """A client chooses how many sessions it has, and when each of them ends."""

    class Watched(dict):
        looks = 0

        def values(self):
            Watched.looks += len(self)
            return super().values()

    index = TierIndex(PLAN)
    pins = SessionPins(index, PLAN, SHARE)
    shared = index.reserve(GROUPS[0], names(0, 0, 1))[0]
    index.commit(GROUPS[0], shared)
    pins._sessions = Watched()
    for number in range(200):
        pin = pins.begin("a", f"session {number}", names(0, 0, 1))
        assert pins.add(pin, (HOST, GROUPS[0]), names(0, 0, 1)) == 1
        pins.end(pin, 10.0 + number)
    # A turn that goes on puts the end off.
    pins.of("a", "session 3")[0].end = 1, names(0, 0, 1)[-1]
    pins.end(pins.begin("a", "session 3", names(0, 0, 1)), 500.0)
    for now in range(300):
        pins.expire(float(now))
        assert len(pins._sessions) == 1 + sum(10 + n > now for n in range(200) if n != 3)
    assert Watched.looks < 200
    pins.expire(500.0)
    assert not pins._sessions
    assert not any(pins.counts().values())


def test_one_tenant_has_a_quarter_of_all_sessions():
    pins = SessionPins(TierIndex(PLAN), PLAN, SHARE)
    begun = [pins.begin("a", str(number), ()) for number in range(MOST_SESSIONS // 4)]
    assert not pins.admits("a", "new")
    assert pins.admits("a", "0")
    assert pins.admits("b", "new")
    pins.release(begun[0])
    assert pins.admits("a", "new")
