"""Defects of pulls are planted in the real code, and the simulator finds each: as in ``test_planted``."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvconnect.decode.finds import Finds
from kvconnect.decode.pulls import PullRequests
from kvconnect.decode.rank_fetches import RankFetches
from kvconnect.offload.worker.named_rows import NamedRows
from kvconnect.prefill.kept_fetches import EVICTED
from tests.simulator.run import run_seed
from tests.simulator.test_planted import seeds_of
from tests.simulator.tiers import SimCopier


def serves_rows_that_were_taken(patch):
    """P does not look whether another job has taken a row since."""
    patch.setattr("kvconnect.offload.worker.named_rows._are_untaken", lambda taken, held: True)


def names_what_is_not_stored_yet(patch):
    """P names rows while they are being filled."""
    take = NamedRows.take

    def take_and_fill(self, job):
        take(self, job)
        if job.hashes:
            self.fill(job, ())

    patch.setattr(NamedRows, "take", take_and_fill)


def takes_any_name(patch):
    """Names that are made otherwise count as ours, on both sides."""

    class Any(NamedRows):
        def find(self, prefix, max_tokens):
            return super().find(msgspec.structs.replace(prefix, naming=self.naming), max_tokens)

        def hold(self, prefix, num_tokens):
            return super().hold(msgspec.structs.replace(prefix, naming=self.naming), num_tokens)

    patch.setattr("tests.simulator.tiers.NamedRows", Any)
    attempt = Finds._try

    def try_anyway(self, number, asked, now):
        peer = self._peers.reach(asked.peer, now)
        if peer.is_ready and (theirs := peer.links[0].session.peer) is not None and theirs.naming is not None:
            prefix = msgspec.structs.replace(asked.order.prefix, naming=theirs.naming)
            asked.order = msgspec.structs.replace(asked.order, prefix=prefix)
        attempt(self, number, asked, now)

    patch.setattr(Finds, "_try", try_anyway)


def takes_other_weights(patch):
    """P does not look at the weights of who asks, nor D at those of who answers."""
    for module in ("transfer.inbound_peers", "peer.agreement"):
        patch.setattr(f"kvconnect.{module}.other_weights", lambda ours, theirs: None)
    patch.setattr("kvconnect.peer.agreement.other_identity", lambda ours, theirs: None)


def believes_any_count(patch):
    """D does not look at how much a peer says that it keeps."""
    patch.setattr("kvconnect.decode.finds._problem", lambda found, prefix, max_tokens: "")


def waits_for_answers_for_ever(patch):
    """A question that is not answered is not over."""
    ask = Finds.ask

    def ask_for_ever(self, order, key, now):
        ask(self, order, key, math.inf)

    patch.setattr(Finds, "ask", ask_for_ever)


def forgets_questions_of_lost_links(patch):
    """What was asked over a connection that broke is dropped."""

    def lost(self, link, reason):
        for number in [number for number, asked in self._asked.items() if asked.link == link]:
            del self._asked[number]

    patch.setattr(Finds, "lost", lost)


def counts_what_was_evicted(patch):
    """D takes what landed, though P says at the end that its rows were used for something else meanwhile."""
    written = RankFetches._written

    def take(self, fetch, message, now):
        if message.error == EVICTED:
            message = msgspec.structs.replace(message, ok=True, error="")
        written(self, fetch, message, now)

    patch.setattr(RankFetches, "_written", take)


def waits_for_others_for_ever(patch):
    """A request waits for another one that asks for the same, however long that takes."""
    patch.setattr(PullRequests, "_leave", lambda self, request_id, key: None)
    waits = PullRequests._waits_for_other
    patch.setattr(
        PullRequests, "_waits_for_other", lambda self, name, pull, key, now: waits(self, name, pull, key, 0.0)
    )


def restores_before_the_device_is_done(patch):
    """Rows are copied to blocks that the device may still use."""
    patch.setattr(SimCopier, "mark", lambda self: lambda: True)


def keeps_blocks_that_are_not_full(patch):
    """D keeps a block that a window begins in, of which its peer had no more than the window."""
    patch.setattr("kvconnect.decode.peers.fills_windows", lambda source, target: True)


# Some are found after dozens of seeds: a minute on two idle cores.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plant", "kind", "found"),
    [
        (serves_rows_that_were_taken, "", {"bytes_are_right"}),
        (names_what_is_not_stored_yet, "", {"bytes_are_right"}),
        (counts_what_was_evicted, "", {"bytes_are_right"}),
        (takes_any_name, "", {"bytes_are_right"}),
        (takes_other_weights, "", {"bytes_are_right"}),
        (believes_any_count, "stranger", {"within_bounds"}),
        (waits_for_answers_for_ever, "", {"in_time", "idle"}),
        (forgets_questions_of_lost_links, "", {"idle", "nothing_spins"}),
        (waits_for_others_for_ever, "", {"all_answered", "idle", "nothing_stands_still"}),
        (keeps_blocks_that_are_not_full, "sliding", {"bytes_are_right"}),
        (restores_before_the_device_is_done, "", {"bytes_are_right"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_of_pulls_is_found(plant, kind, found, monkeypatch):
    plant(monkeypatch)
    kind, model = ("", kind) if kind == "sliding" else (kind, "")
    broken = ((seed, run_seed(seed)) for seed in seeds_of("", kind, plant.__name__, kept=True, model=model))
    seed, outcome = next((seed, outcome) for seed, outcome in broken if outcome.invariant)
    assert outcome.invariant in found, (seed, outcome.text)
