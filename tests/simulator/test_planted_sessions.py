"""Defects of sessions are planted in the real code, and the simulator finds each: as in ``test_planted``."""

from __future__ import annotations

import math

import pytest

from kvconnect.offload.index.session_pins import Ledger, SessionPins
from kvconnect.offload.index.tier_index import READY, ClassRows
from kvconnect.offload.scheduler.host import LowerIndex
from kvconnect.offload.scheduler.sessions import Sessions
from tests.simulator.disk import SimDisk
from tests.simulator.run import run_seed
from tests.simulator.test_planted import seeds_of


def evicts_what_is_pinned(patch):
    """What a session pinned makes room like anything else."""

    def may_go(self, rows):
        return (self.state[rows] == READY) & (self.pins[rows] == 0)

    patch.setattr(ClassRows, "may_go", may_go)


def knows_no_quota(patch):
    """A tenant may pin all that there is."""
    init = Ledger.__init__
    patch.setattr(Ledger, "__init__", lambda self, limit, share: init(self, limit, 1.0))


def lets_all_tenants_pin_everything(patch):
    """Nothing is left to those who pin nothing."""
    patch.setattr("kvconnect.offload.index.session_pins.MOST_PINNED", 1.0)


def counts_what_is_over(patch):
    """What a pin let go of counts against the quota all the same."""

    def remove(self, tenant, names):
        return [name for name in names if self.all[name] == 1]

    patch.setattr(Ledger, "remove", remove)


def forgets_rows_at_a_release(patch):
    """The session is gone from the books, and its rows stay pinned."""
    release = SessionPins.release

    def forget(self, pin):
        pin.held = {}
        release(self, pin)

    patch.setattr(SessionPins, "release", forget)


def releases_nothing(patch):
    """The answer is that it was released."""
    done = {"outcome": "accepted", "tier": "host", "num_tokens": 1}
    act = Sessions._release

    def release(self, turn, ask, num_tokens, now):
        return done if self._pins.of(*ask.payload.session) else act(self, turn, ask, num_tokens, now)

    patch.setattr(Sessions, "_release", release)


def never_expires(patch):
    """A pin has no end."""
    patch.setattr(SessionPins, "expire", lambda self, now: None)


def accepts_whatever_came_of_it(patch):
    """A part of what was asked for counts as all of it."""

    def done(is_whole, tier, num_tokens, reason=""):
        return {"outcome": "accepted", "tier": tier, "num_tokens": num_tokens}

    patch.setattr("kvconnect.offload.scheduler.sessions._done", done)


def accepts_what_it_does_not_hold(patch):
    """The last content of what is pinned is left out."""
    add = SessionPins.add

    def add_fewer(self, pin, place, names):
        return len(names) if len(names) == add(self, pin, place, names[:-1]) + 1 else 0

    patch.setattr(SessionPins, "add", add_fewer)


def ends_what_a_session_had(patch):
    """A turn that ends early takes with it what the session pinned before."""
    begin = SessionPins.begin

    def take_over(self, tenant, session, names):
        pin = begin(self, tenant, session, names)
        pin.until = -math.inf
        return pin

    patch.setattr(SessionPins, "begin", take_over)


def demotes_what_is_nowhere_else(patch):
    """Host memory lets go of what is not on disk."""
    patch.setattr(LowerIndex, "has", lambda self, tier, group, names: [True] * len(names))


def makes_room_on_disk(patch):
    """What is pinned on disk makes room like anything else, and the disk is small."""
    patch.setattr(SimDisk, "pin", lambda self, pins: None)
    init = SimDisk.__init__

    def small(self, worker, keeps, row_bytes):
        init(self, worker, keeps, row_bytes)
        self._limit_bytes = 8 * row_bytes

    patch.setattr(SimDisk, "__init__", small)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (evicts_what_is_pinned, {"pins_are_kept", "pins_end"}),
        (knows_no_quota, {"quotas_hold"}),
        (lets_all_tenants_pin_everything, {"quotas_hold"}),
        (counts_what_is_over, {"pins_end"}),
        (forgets_rows_at_a_release, {"pins_end"}),
        (releases_nothing, {"pins_end", "outcomes_are_true"}),
        (never_expires, {"pins_end"}),
        (accepts_whatever_came_of_it, {"outcomes_are_true"}),
        (accepts_what_it_does_not_hold, {"pins_are_kept"}),
        # What was promised and is forgotten counts on, beside what is pinned in its place.
        (ends_what_a_session_had, {"pins_are_kept", "quotas_hold"}),
        (demotes_what_is_nowhere_else, {"pins_are_kept"}),
        (makes_room_on_disk, {"pins_are_kept"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_of_sessions_is_found(plant, found, monkeypatch):
    plant(monkeypatch)
    broken = ((seed, run_seed(seed)) for seed in seeds_of("", "", plant.__name__, kept=True, sessions=True))
    seed, outcome = next((seed, outcome) for seed, outcome in broken if outcome.invariant)
    assert outcome.invariant in found, (seed, outcome.text)
