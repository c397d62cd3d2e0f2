"""Each checker finds what it is there for: a defect is planted in the real code, and seeds are run."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest

from kvconnect.decode.decode_requests import DecodeRequests, EarlyLoads
from kvconnect.decode.decode_side import DecodeSide
from kvconnect.decode.landing import LandingBay
from kvconnect.decode.loads import RankFetch, RankFetchState
from kvconnect.decode.rank_fetches import RankFetches
from kvconnect.outcome import Cause
from kvconnect.peer.handles import Handles
from kvconnect.prefill.fetch_service import FetchService
from kvconnect.prefill.leases import Held, Lease, LeaseBook, Streamed
from kvconnect.prefill.outbox import SlotOutbox
from kvconnect.prefill.pending_fetches import PendingFetches
from kvconnect.prefill.prefill_side import PrefillSide
from kvconnect.prefill.sender import Sender
from kvconnect.transfer.breaker import Breaker
from kvconnect.transfer.orders import Reports
from kvconnect.transfer.parts import DeviceSteps
from kvconnect.transfer.slots import SlotEvent, SlotPool
from tests.simulator.draw import draw_scenario
from tests.simulator.engine import SimEngine
from tests.simulator.run import run_seed

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

    def take_and_keep(self, event, *others):
        slot = take(self, event, *others)
        if event is SlotEvent.LEND:
            self._free.append(slot)
        return slot

    patch.setattr(SlotPool, "take", take_and_keep)


def ignores_the_digest(patch):
    """What landed is served, whatever it is."""
    patch.setattr(
        LandingBay, "_check_digest", property(lambda self: False, lambda self, wanted: None), raising=False
    )


def ignores_the_generation(patch):
    """Whatever slot a peer names, one that it was granted is taken."""
    landed = LandingBay.landed

    def take_any(self, landing, message):
        if landing is not None and landing.lent and message.generation not in landing.lent:
            message = msgspec.structs.replace(message, generation=min(landing.lent))
        return landed(self, landing, message)

    patch.setattr(LandingBay, "landed", take_any)


def takes_the_slots_of_others(patch):
    """A peer may name any slot that is lent, to whomever."""
    landed = LandingBay.landed

    def take_any(self, landing, message):
        for other in self._landings.values() if landing is not None else ():
            if message.generation in other.lent:
                landing.lent.setdefault(message.generation, other.lent[message.generation])
        return landed(self, landing, message)

    patch.setattr(LandingBay, "landed", take_any)


def believes_whoever_speaks(patch):
    """What is said of a fetch counts, over whatever connection it is said."""
    receive = RankFetches.receive

    def receive_all(self, message, link, now):
        rank_fetch = self._asked.get(message.transfer_id)
        receive(self, message, link if rank_fetch is None else rank_fetch.link, now)

    patch.setattr(RankFetches, "receive", receive_all)


def gives_a_handle_twice(patch):
    """P sends what it holds to whoever asks."""

    def claim(self, consumer, consumers):
        self.owner, self.consumers = consumer[0], consumers

    patch.setattr(Lease, "claim", claim)
    patch.setattr(Lease, "satisfied", property(lambda self: False))


def reads_expired_handles(patch):
    """D does not look at when a handle expires."""
    read = Handles.read
    patch.setattr(
        Handles, "read", lambda self, handle, *, even_expired=False: read(self, handle, even_expired=True)
    )


def reads_forged_handles(patch):
    """D does not look at the code of a handle."""
    patch.setattr("kvconnect.peer.handles.hmac.compare_digest", lambda one, other: True)


def loses_a_report(patch):
    """One load in three is forgotten."""
    report, count = Reports.received, itertools.count()

    def lose(self, request_id, error):
        if next(count) % 3:
            report(self, request_id, error)

    patch.setattr(Reports, "received", lose)


def reports_twice(patch):
    """A load that failed is reported once more."""
    report = Reports.received

    def repeat(self, request_id, error):
        report(self, request_id, error)
        if error:
            report(self, request_id, error)

    patch.setattr(Reports, "received", repeat)


def sends_before_it_is_computed(patch):
    """P does not wait for the device."""
    patch.setattr(DeviceSteps, "finished", lambda self, step: lambda: True)


def waits_for_the_step_before(patch):
    """P takes the last step to be over when the one before it is."""
    finished = DeviceSteps.finished
    patch.setattr(DeviceSteps, "finished", lambda self, step: finished(self, step - 1))


def unpacks_to_blocks_in_use(patch):
    """D does not wait for the device."""
    load = DecodeSide.load
    patch.setattr(DecodeSide, "load", lambda self, order, _, now: load(self, order, lambda: True, now))


def trusts_lost_blocks(patch):
    """A prefill that was preempted is sent from the blocks that it had."""

    def add(self, order, is_computed):
        self.marks.append((is_computed, order.computed_tokens))
        for news in order.groups:
            if news.first_block == len(self.blocks.get(news.group, ())):
                self.blocks.setdefault(news.group, []).extend(news.block_ids)
        return True

    patch.setattr(Streamed, "add", add)
    patch.setattr(PrefillSide, "preempted", lambda self, order: None)
    patch.setattr(PrefillSide, "_cut_short", lambda self, lease, reason, again: None)


def keeps_leases_for_ever(patch):
    """A lease that nobody asks for does not end."""
    patch.setattr(Held, "expires_at", property(lambda self: 1e9, lambda self, time: None), raising=False)


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


def never_hears_what_is_settled(patch):
    """D gives no blocks to what had to wait, whatever P says."""
    update = DecodeRequests.update_results
    patch.setattr(
        DecodeRequests,
        "update_results",
        lambda self, results: update(self, msgspec.structs.replace(results, settled=())),
    )


def goes_on_as_ever(patch):
    """A node that shall end keeps its leases."""
    patch.setattr(PrefillSide, "drain", lambda self, *asked: None)


def renews_a_link_under_others(patch):
    """An engine that gives up what is cancelled, and then everything else that is under way to that peer."""
    submit, broken = SimEngine.submit, set()

    def cancel(self, batch_id):
        if batch_id in self._flights:
            broken.add((self, self._flights[batch_id].batch.peer))
            self.abandon(batch_id)

    def renew_and_submit(self, batch):
        if (self, batch.peer) in broken:
            broken.discard((self, batch.peer))
            for flight in list(self._flights.values()):
                if flight.batch.peer == batch.peer:
                    self.abandon(flight.batch.batch_id)
        submit(self, batch)

    patch.setattr(SimEngine, "cancel", cancel)
    patch.setattr(SimEngine, "submit", renew_and_submit)


FOUND_AT = {
    "packs_into_what_may_be_read": 100834,
    "reads_expired_handles": 100118,
    "reads_forged_handles": 102124,
    "unpacks_to_blocks_in_use": 100053,
    "trusts_lost_blocks": 105573,
    "serves_rows_that_were_taken": 100224,
    "names_what_is_not_stored_yet": 100339,
    "counts_what_was_evicted": 100224,
    "takes_other_weights": 100172,
    "believes_any_count": 100678,
    "waits_for_answers_for_ever": 100045,
    "keeps_blocks_that_are_not_full": 101199,
    "ends_what_a_session_had": 100446,
}
"""The seeds that found what takes dozens: a search begins there, and goes on where draws have changed."""


def seeds_of(
    theme: str, kind: str, plant: str = "", *, kept: bool = False, sessions: bool = False, model: str = ""
):
    """Seeds in which a fault of this kind can happen, from the one on that found what was planted."""
    seeds = range(FOUND_AT.get(plant, 100_000), 200_000)
    drawn = ((seed, draw_scenario(seed, random.Random(seed))) for seed in seeds)
    fitting = (
        seed
        for seed, plan in drawn
        if theme in ("", plan.theme)
        and (kind in ("", *plan.kinds) or (kind == "none" and not plan.kinds))
        and (plan.nodes[0].keeps is not None or not kept)
        and (not sessions or any(request.session is not None for request in plan.requests))
        and model in ("", plan.model.name)
    )
    return itertools.islice(fitting, MOST_SEEDS)


# Where draws have changed some are found after dozens of seeds: half a minute on an idle core.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "theme", "kind", "found"),
    [
        (frees_while_sending, "busy", "", {"nobody_reads"}),
        (reports_before_quiet, "busy", "", {"nobody_writes"}),
        (lends_what_may_be_written, "busy", "", {"slots_are_quiet"}),
        (packs_into_what_may_be_read, "busy", "", {"slots_are_quiet"}),
        (lends_pages, "", "", {"no_page_is_written"}),
        (sends_pages, "", "", {"no_page_is_read"}),
        (lends_a_slot_twice, "streams", "", {"slots_add_up"}),
        (ignores_the_digest, "streams", "engine", {"bytes_are_right"}),
        (ignores_the_digest, "", "stranger", {"bytes_are_right"}),
        (ignores_the_generation, "", "stranger", {"slot_is_granted"}),
        (takes_the_slots_of_others, "streams", "stranger", {"slot_is_granted", "no_exception"}),
        (believes_whoever_speaks, "", "stranger", {"slot_is_granted", "bytes_are_right", "slots_are_quiet"}),
        (gives_a_handle_twice, "", "replays", {"opens_once"}),
        (reads_expired_handles, "", "", {"forged_opens_nothing"}),
        (reads_forged_handles, "", "stranger", {"forged_opens_nothing"}),
        (loses_a_report, "", "", {"idle", "all_answered", "nothing_stands_still", "nothing_spins"}),
        (reports_twice, "", "kills", {"each_once"}),
        (sends_before_it_is_computed, "", "", {"bytes_are_right"}),
        (waits_for_the_step_before, "", "", {"bytes_are_right"}),
        (unpacks_to_blocks_in_use, "", "", {"bytes_are_right"}),
        (trusts_lost_blocks, "streams", "", {"bytes_are_right", "nobody_reads"}),
        (keeps_leases_for_ever, "", "aborts", {"in_time", "idle"}),
        (waits_too_long, "busy", "", {"in_time"}),
        (refuses_whoever_comes_early, "", "none", {"success"}),
        (begins_early_without_a_bound, "", "none", {"nothing_stands_still"}),
        (never_hears_what_is_settled, "", "none", {"nothing_stands_still"}),
        (sends_without_a_bound, "streams", "", {"within_bounds"}),
        (never_pauses, "", "kills", {"nothing_spins"}),
        (goes_on_as_ever, "", "drains", {"drained_in_time"}),
        (renews_a_link_under_others, "", "leavers", {"success"}),
        (raises, "streams", "", {"no_exception"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_is_found(plant, theme, kind, found, monkeypatch):
    plant(monkeypatch)
    broken = ((seed, run_seed(seed)) for seed in seeds_of(theme, kind, plant.__name__))
    seed, outcome = next((seed, outcome) for seed, outcome in broken if outcome.invariant)
    assert outcome.invariant in found, (seed, outcome.text)
