"""Each checker finds what it is there for: a defect is planted in the real code, and seeds are run."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest

from kvconnect.decode.decode_requests import EarlyLoads
from kvconnect.decode.finds import Finds
from kvconnect.decode.landing import LandingBay
from kvconnect.decode.loads import RankFetch, RankFetchState
from kvconnect.decode.rank_fetches import RankFetches
from kvconnect.offload.index.session_pins import Ledger, SessionPins
from kvconnect.offload.scheduler.host import LowerIndex
from kvconnect.offload.scheduler.parking_lot import ParkingLot
from kvconnect.offload.tier import DISK
from kvconnect.offload.worker.prefix_blocks import PrefixBlocks
from kvconnect.outcome import Cause
from kvconnect.prefill.fetch_service import FetchService
from kvconnect.prefill.leases import Lease, LeaseBook
from kvconnect.prefill.outbox import SlotOutbox
from kvconnect.prefill.pending_fetches import PendingFetches
from kvconnect.prefill.prefill_side import PrefillSide
from kvconnect.prefill.sender import Sender
from kvconnect.transfer.breaker import Breaker
from kvconnect.transfer.orders import Reports
from kvconnect.transfer.parts import DeviceSteps
from kvconnect.transfer.slots import SlotPool, SlotState
from tests.engine.faulty_engine import FaultyEngine
from tests.simulator.draw import draw_scenario
from tests.simulator.engine import SimEngine
from tests.simulator.run import run_seed
from tests.simulator.tiers import SimCopier, SimDisk

MOST_SEEDS = 300


def frees_while_sending(patch):
    """P lets go of blocks as soon as somebody asks for them."""
    end_if_due = LeaseBook.end_if_due

    def end_also_while_sending(self, lease, now):
        sending, lease.sending = lease.sending, set()
        end_if_due(self, lease, now)
        lease.sending = sending

    patch.setattr(LeaseBook, "end_if_due", end_also_while_sending)
    patch.setattr(Lease, "satisfied", property(lambda self: self.consumers is not None))


def reports_before_quiet(patch):
    """D does not wait until what landed is unpacked."""
    over = (RankFetchState.LANDED, RankFetchState.FAILED, RankFetchState.UNPACKING)
    patch.setattr(RankFetch, "over", property(lambda self: self.state in over))


def lends_what_may_be_written(patch):
    """D lends slots anew that a peer which it lost may still write."""
    close = LandingBay.close
    patch.setattr(LandingBay, "close", lambda self, landing, *others: close(self, landing, None))


def packs_into_what_may_be_read(patch):
    """P packs into slots anew that its library may still read."""
    settle = Sender._settle
    patch.setattr(Sender, "_settle", lambda self, now: settle(self, math.inf))


def lends_pages(patch):
    """D has a peer write where its pages are."""
    lend = LandingBay._lend

    def lend_pages(self, landing):
        grant = lend(self, landing)
        return msgspec.structs.replace(grant, address=self._pool.slots[0].address - grant.length_bytes)

    patch.setattr(LandingBay, "_lend", lend_pages)


def sends_pages(patch):
    """P gives its library pages to read."""
    peek = SlotOutbox.peek

    def peek_at_pages(self):
        batch = peek(self)
        if batch is None:
            return None
        # Landing slots lie behind the pages, and send slots behind these.
        pages_end = self._pool.slots[0].address - len(self._pool.slots) * self._pool.slot_bytes
        return pages_end - self._pool.slot_bytes, *batch[1:]

    patch.setattr(SlotOutbox, "peek", peek_at_pages)


def lends_a_slot_twice(patch):
    """A slot stays among those that can be taken."""
    take = SlotPool.take

    def take_and_keep(self, state, *others):
        slot = take(self, state, *others)
        if state is SlotState.THEIRS:
            self._free.append(slot)
        return slot

    patch.setattr(SlotPool, "take", take_and_keep)


def ignores_the_digest(patch):
    """What landed is served, whatever it is."""
    take = LandingBay._take

    def take_any(self, landing, slot, message, ticket):
        take(self, landing, slot, msgspec.structs.replace(message, digest=ticket.digest), ticket)

    patch.setattr(LandingBay, "_take", take_any)


def ignores_the_generation(patch):
    """Whatever slot a peer names, one that it was granted is taken."""
    landed = LandingBay.landed

    def take_any(self, landing, message):
        if landing is not None and landing.lent and message.generation not in landing.lent:
            message = msgspec.structs.replace(message, generation=min(landing.lent))
        return landed(self, landing, message)

    patch.setattr(LandingBay, "landed", take_any)


def gives_a_handle_twice(patch):
    """P sends what it holds to whoever asks."""

    def claim(self, consumer, consumers):
        self.owner, self.consumers = consumer[0], consumers

    patch.setattr(Lease, "claim", claim)
    patch.setattr(Lease, "satisfied", property(lambda self: False))


def reads_forged_handles(patch):
    """D does not look at the code of a handle."""
    patch.setattr("kvconnect.peer.handles.hmac.compare_digest", lambda one, other: True)


def loses_a_report(patch):
    """One load in three is forgotten."""
    add, count = Reports.add, itertools.count()

    def lose(self, results):
        if not results.received or next(count) % 3:
            add(self, results)

    patch.setattr(Reports, "add", lose)


def reports_twice(patch):
    """A load that failed is reported once more."""
    add = Reports.add

    def repeat(self, results):
        for _ in range(2 if results.received and results.failed else 1):
            add(self, results)

    patch.setattr(Reports, "add", repeat)


def sends_before_it_is_computed(patch):
    """P does not wait for the device."""
    patch.setattr(DeviceSteps, "finished", lambda self, step: lambda: True)


def keeps_leases_for_ever(patch):
    """A lease that nobody asks for does not end."""
    patch.setattr(Lease, "expires_at", property(lambda self: 1e9, lambda self, time: None), raising=False)


def sends_without_a_bound(patch):
    """Bytes under way are not counted."""
    patch.setattr(
        Sender, "_in_flight_bytes", property(lambda self: 0, lambda self, count: None), raising=False
    )


def never_pauses(patch):
    """A peer that is gone is tried again at once."""
    patch.setattr(Breaker, "may_try", lambda self, now: True)


def raises(patch):
    """A message is met by an error of ours."""
    granted, count = FetchService.granted, itertools.count(1)

    def fail(self, key, message):
        if not next(count) % 5:
            raise KeyError(key)
        granted(self, key, message)

    patch.setattr(FetchService, "granted", fail)


def waits_too_long(patch):
    """D keeps slots back long after they are quiescent."""
    longest = RankFetches._longest_write
    patch.setattr(RankFetches, "_longest_write", lambda self, load, now: longest(self, load, now) + 40)


def refuses_whoever_comes_early(patch):
    """P has no patience with a fetch that comes before its request is held."""
    patch.setattr(
        PendingFetches, "admit", lambda self, early, now, is_served=False: Cause.NOT_HELD("it is not held")
    )


def begins_early_without_a_bound(patch):
    """D gives blocks to whatever is announced, and has none for what P holds."""
    patch.setattr(EarlyLoads, "may_begin", lambda self, num_tokens: True)


def goes_on_as_ever(patch):
    """A node that shall end keeps its leases."""
    patch.setattr(PrefillSide, "drain", lambda self, *asked: None)


def renews_a_link_under_others(patch):
    """An engine that gives up what is cancelled, and then everything else that is under way to that peer."""
    submit, abandon, broken = SimEngine.submit, FaultyEngine.cancel, set()

    def cancel(self, batch_id):
        if batch_id in self._flights:
            broken.add((self, self._flights[batch_id].batch.peer))
            abandon(self, batch_id)

    def renew_and_submit(self, batch):
        if (self, batch.peer) in broken:
            broken.discard((self, batch.peer))
            for flight in list(self._flights.values()):
                if flight.batch.peer == batch.peer:
                    abandon(self, flight.batch.batch_id)
        submit(self, batch)

    patch.setattr(SimEngine, "cancel", cancel)
    patch.setattr(SimEngine, "submit", renew_and_submit)


# --- of pulls


def waits_for_answers_for_ever(patch):
    """A question that is not answered is not over."""
    ask = Finds.ask

    def ask_for_ever(self, order, now):
        ask(self, order, math.inf)

    patch.setattr(Finds, "ask", ask_for_ever)


def serves_blocks_that_were_reused(patch):
    """P gives what has a name once, whatever became of the block on its device since."""

    def keep(self, group, name, place, number):
        self._places[group][name] = place, number

    patch.setattr(PrefixBlocks, "_put", keep)
    patch.setattr(PrefixBlocks, "_are_there", lambda self, index, places, numbers: numbers >= 0)


def restores_before_the_device_is_done(patch):
    """Rows are copied to blocks that the device may still use."""
    patch.setattr(SimCopier, "mark", lambda self: lambda: True)


def keeps_blocks_that_are_not_full(patch):
    """D keeps a block that a window begins in, of which its peer had no more than the window."""
    patch.setattr("kvconnect.decode.peers.fills_windows", lambda source, target: True)


# --- of sessions


def evicts_what_is_pinned(patch):
    """What a session pinned makes room like anything else."""

    apply = SessionPins._apply

    def only_on_disk(self, place, names, is_pinned):
        if place[0] == DISK:
            apply(self, place, names, is_pinned)

    patch.setattr(SessionPins, "_apply", only_on_disk)


def knows_no_quota(patch):
    """A tenant may pin all that there is."""
    init = Ledger.__init__
    patch.setattr(Ledger, "__init__", lambda self, limit, share: init(self, limit, 1.0))


def lets_all_tenants_pin_everything(patch):
    """Nothing is left to those who pin nothing."""
    patch.setattr("kvconnect.offload.index.session_pins.MOST_PINNED", 1.0)


def forgets_rows_at_a_release(patch):
    """The session is gone from the books, and its rows stay pinned."""
    release = SessionPins.release

    def forget(self, pin):
        pin.held = {}
        release(self, pin)

    patch.setattr(SessionPins, "release", forget)


def never_expires(patch):
    """A pin has no end."""
    patch.setattr(SessionPins, "expire", lambda self, now: None)


def accepts_whatever_came_of_it(patch):
    """A part of what was asked for counts as all of it."""

    def done(is_whole, tier, num_tokens, reason=""):
        return {"outcome": "accepted", "tier": tier, "num_tokens": num_tokens}

    patch.setattr("kvconnect.offload.scheduler.sessions._done", done)


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


def frees_rows_that_are_restored(patch):
    """The rows of parked KV are free once they are to be copied."""
    restore = ParkingLot.restore

    def restore_and_free(self, request_id, parked, blocks):
        restore(self, request_id, parked, blocks)
        self._free(self.restoring.pop(request_id))

    patch.setattr(ParkingLot, "restore", restore_and_free)


FOUND_AT = {
    "packs_into_what_may_be_read": 100980,
    "reads_forged_handles": 102124,
    "serves_blocks_that_were_reused": 100031,
    "waits_for_answers_for_ever": 100105,
    "keeps_blocks_that_are_not_full": 103758,
    "waits_too_long": 100202,
    "sends_without_a_bound": 100234,
    "never_pauses": 100187,
    "goes_on_as_ever": 100062,
    "renews_a_link_under_others": 103102,
    "restores_before_the_device_is_done": 100077,
    "demotes_what_is_nowhere_else": 100228,
    "makes_room_on_disk": 100030,
}
"""The seeds that found what takes dozens: a search begins there, and goes on where draws have changed."""


def parks(plan):
    """Decode nodes park the KV of requests that wait for blocks."""
    return any(node.keeps is not None and node.keeps.park_share > 0 for node in plan.nodes)


def seeds_of(plant, *, theme="", kind="", kept=False, parked=False, sessions=False, model=""):
    """Seeds in which a fault of this kind can happen, from the one on that found what was planted."""
    seeds = range(FOUND_AT.get(plant.__name__, 100_000), 200_000)
    drawn = ((seed, draw_scenario(seed, random.Random(seed))) for seed in seeds)
    fitting = (
        seed
        for seed, plan in drawn
        if theme in ("", plan.theme)
        and (kind in ("", *plan.kinds) or (kind == "none" and not plan.kinds))
        and (not kept or (plan.nodes[0].keeps is not None and not parks(plan)))
        and (not parked or parks(plan))
        and (not sessions or any(request.session is not None for request in plan.requests))
        and model in ("", plan.model.name)
    )
    return itertools.islice(fitting, MOST_SEEDS)


KEPT = {"kept": True}
PARKED = {"parked": True}
SESSIONS = {"kept": True, "sessions": True}


# Where draws have changed some are found after dozens of seeds: half a minute on an idle core.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "where", "found"),
    [
        (frees_while_sending, {"theme": "busy"}, {"nobody_reads"}),
        # Such a load also leaves its landing behind.
        (reports_before_quiet, {"theme": "busy"}, {"nobody_writes", "idle", "bytes_are_right"}),
        (lends_what_may_be_written, {"theme": "busy"}, {"slots_are_quiet"}),
        (packs_into_what_may_be_read, {"theme": "busy"}, {"slots_are_quiet"}),
        (lends_pages, {}, {"no_page_is_written"}),
        (sends_pages, {}, {"no_page_is_read"}),
        (lends_a_slot_twice, {"theme": "streams"}, {"slots_add_up"}),
        (ignores_the_digest, {"theme": "streams", "kind": "engine"}, {"bytes_are_right"}),
        (ignores_the_digest, {"kind": "stranger"}, {"bytes_are_right"}),
        (ignores_the_generation, {"kind": "stranger"}, {"slot_is_granted"}),
        (gives_a_handle_twice, {"kind": "replays"}, {"opens_once"}),
        (reads_forged_handles, {"kind": "stranger"}, {"forged_opens_nothing"}),
        (loses_a_report, {}, {"idle", "all_answered", "nothing_stands_still", "nothing_spins"}),
        (reports_twice, {"kind": "kills"}, {"each_once"}),
        (sends_before_it_is_computed, {}, {"bytes_are_right"}),
        (keeps_leases_for_ever, {"kind": "aborts"}, {"in_time", "idle"}),
        (waits_too_long, {"theme": "busy"}, {"in_time"}),
        (refuses_whoever_comes_early, {"kind": "none"}, {"success"}),
        (begins_early_without_a_bound, {"kind": "none"}, {"nothing_stands_still"}),
        (sends_without_a_bound, {"theme": "streams"}, {"within_bounds"}),
        (never_pauses, {"kind": "kills"}, {"nothing_spins"}),
        (goes_on_as_ever, {"kind": "drains"}, {"drained_in_time"}),
        (renews_a_link_under_others, {"kind": "leavers"}, {"success"}),
        (raises, {"theme": "streams"}, {"no_exception"}),
        (serves_blocks_that_were_reused, KEPT, {"bytes_are_right"}),
        (waits_for_answers_for_ever, KEPT, {"in_time", "idle"}),
        (keeps_blocks_that_are_not_full, {**KEPT, "model": "sliding"}, {"bytes_are_right"}),
        (restores_before_the_device_is_done, KEPT, {"bytes_are_right"}),
        (evicts_what_is_pinned, SESSIONS, {"pins_are_kept", "pins_end"}),
        (knows_no_quota, SESSIONS, {"quotas_hold"}),
        (lets_all_tenants_pin_everything, SESSIONS, {"quotas_hold"}),
        (forgets_rows_at_a_release, SESSIONS, {"pins_end"}),
        (never_expires, SESSIONS, {"pins_end"}),
        (accepts_whatever_came_of_it, SESSIONS, {"outcomes_are_true"}),
        (demotes_what_is_nowhere_else, SESSIONS, {"pins_are_kept"}),
        (makes_room_on_disk, SESSIONS, {"pins_are_kept"}),
        (frees_rows_that_are_restored, PARKED, {"bytes_are_right"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found(plant, where, found, monkeypatch):
    plant(monkeypatch)
    broken = ((seed, run_seed(seed)) for seed in seeds_of(plant, **where))
    seed, outcome = next((seed, outcome) for seed, outcome in broken if outcome.invariant)
    assert outcome.invariant in found, (seed, outcome.text)
