"""The worker that asks peers for KV by name: questions, answers, and fetches that stand for no lease.

P is a real worker that knows no names: the network answers for it, and makes fetches by name those of a
request that P holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import pytest

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.config import ExtraConfig
from kvconnect.engine.lanes import Transport
from kvconnect.peer import messages as m
from kvconnect.transfer.local import without_slots
from kvconnect.transfer.orders import Find, Orders
from tests.transfer.pair import BLOCK_TOKENS, D_IDS, P_IDS, Pair

NAMING = Naming("blake", BLOCK_TOKENS)
NAMES = tuple(bytes([n]) * 16 for n in range(3))
PREFIX = Prefix(NAMING, 0, NAMES)
TOKENS = 3 * BLOCK_TOKENS


@dataclass
class KeepingPair(Pair):
    """A pair whose P keeps three blocks under names, as far as D can tell; mute without an ``answer``."""

    naming: Naming | None = NAMING
    answer: tuple[int, int] | None = (TOKENS, 4000)
    rate: float | None = 4000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.network.taps.append(self._speak)

    def _speak(self, message):
        match message:
            case m.Welcome(introduction=ours):
                named = msgspec.structs.replace(ours, naming=self.naming)
                return [msgspec.structs.replace(message, introduction=named)]
            case m.FindPrefix(number=number):
                if self.rate is not None:
                    self.say(Transport("tcp", bytes_per_s=self.rate))
                if self.answer is not None:
                    self.say(m.PrefixFound(number, *self.answer))
                return []
            case m.Fetch(prefix=Prefix()):
                return [msgspec.structs.replace(message, prefix=None, handle="handle-kept")]
        return [message]

    def find(self, request="a", prefix=PREFIX) -> None:
        port = self.prefill.channel.port
        order = Find(request, ("", "h", port), prefix, TOKENS)
        self.decode.order(Orders(finds=(order,)))

    @property
    def found(self):
        return [found for results in self.decode.results for found in results.found]


def keeping(**config) -> KeepingPair:
    return KeepingPair(ExtraConfig(**config))


def asked_for(run_s=0.2, **peer) -> KeepingPair:
    """A pair of which D has looked something up at P, which is like this."""
    pair = KeepingPair(**peer)
    pair.find()
    pair.run(run_s)
    return pair


def test_a_peer_is_met_and_asked_and_its_answer_is_reported_once():
    pair = asked_for()
    (asked,) = pair.network.heard(m.FindPrefix)
    assert (asked.prefix, asked.max_tokens) == (PREFIX, TOKENS)
    (found,) = pair.found
    assert (found.request_id, found.num_tokens, found.seconds, found.error) == ("a", TOKENS, 1.0, None)
    assert not len(pair.decode.transfers.decode.finds)
    pair.assert_idle()


def test_an_answer_waits_for_the_rate_of_its_link_and_no_longer_than_one_that_pays_takes():
    pair = asked_for(0.02, rate=None)
    assert not pair.found
    assert pair.decode.transfers.timers.next_at() < pair.clock.now + 0.04
    pair.say(Transport("tcp", bytes_per_s=2000.0))
    pair.run(0.01)
    assert [found.seconds for found in pair.found] == [2.0]


@pytest.mark.parametrize("rate", [None, 0.0])
def test_an_answer_over_a_link_whose_rate_is_not_known_is_reported_as_endless(rate, caplog):
    caplog.set_level("INFO")
    pair = asked_for(0.1, rate=rate)
    assert [(found.num_tokens, found.seconds) for found in pair.found] == [(TOKENS, math.inf)]
    assert "its link is not measured" in caplog.text
    pair.assert_idle()


def test_nothing_is_found_over_a_link_that_settings_refuse():
    pair = keeping(min_gb_per_s=1.0)
    pair.find()
    pair.run(0.1)
    assert "min_gb_per_s is 1" in pair.found[0].error.text


def test_a_source_is_to_measure_its_link_when_it_is_met():
    port = keeping().prefill.channel.port
    sources = ExtraConfig(sources=(f"h:{port}",))
    pair = KeepingPair(sources, prefill_config=ExtraConfig())
    pair.run(0.1)
    assert [asked.prefix.names for asked in pair.network.heard(m.FindPrefix)] == [()]
    assert not pair.found
    pair.find()
    pair.run(0.1)
    assert len(pair.found) == 1


@pytest.mark.parametrize("theirs", [None, Naming("blake", 8), Naming("sha", BLOCK_TOKENS)])
def test_a_peer_with_other_names_is_not_asked_and_its_naming_is_reported(theirs):
    pair = asked_for(naming=theirs)
    assert not pair.network.heard(m.FindPrefix)
    (found,) = pair.found
    assert (found.num_tokens, found.naming, found.error) == (0, theirs, None)


def test_a_peer_whose_cache_cannot_be_matched_with_ours_is_not_asked():
    pair = keeping()
    pair.decode.introduce(slot_bytes=0)
    pair.find()
    pair.run(0.2)
    assert not pair.network.heard(m.FindPrefix)
    assert pair.found[0].error.text == without_slots("decode")


def test_a_peer_that_does_not_answer_is_not_waited_for():
    pair = asked_for(0.45, answer=None)
    assert not pair.found
    pair.run(0.1)
    assert "did not answer a lookup within 0.5 s" in pair.found[0].error.text
    pair.say(m.PrefixFound(1, TOKENS, 1))
    pair.run(0.1)
    assert len(pair.found) == 1, "what comes too late is no second report"
    assert pair.decode.count("failures") == 0


def test_a_peer_that_is_gone_or_out_of_reach_is_reported_at_once():
    pair = asked_for(0.1, answer=None)
    pair.network.kill(pair.prefill.channel.port)
    pair.decode.step(pair.clock.now)
    assert pair.found[0].error
    pair.find("b")
    for _ in range(40):
        pair.clock.now += 0.02
        pair.decode.step(pair.clock.now)
    pair.find("c")
    pair.decode.step(pair.clock.now)
    assert [found.request_id for found in pair.found] == ["a", "b", "c"]
    assert all(found.error for found in pair.found)


def test_only_rank_0_asks():
    pair = keeping()
    pair.decode.introduce(rank=1)
    pair.find()
    pair.run(0.2)
    assert not pair.network.said


def test_a_load_by_name_pins_what_the_peer_keeps_and_goes_on_like_any_other():
    pair = keeping()
    pair.hold("kept", P_IDS, "pin:a")
    pair.load("a", D_IDS, "pin:a", engine_id="", prefix=PREFIX, run_s=2.0)
    assert pair.decode.received == ["a"]
    assert not pair.decode.failed
    assert pair.landed()
    pinned, fetch = (message for message in pair.network.said if isinstance(message, m.PinPrefix | m.Fetch))
    assert (pinned.prefix, pinned.handle, pinned.num_tokens) == (PREFIX, "pin:a", TOKENS)
    assert fetch.handle == "pin:a"
    pair.assert_idle()


def test_a_load_by_name_of_a_peer_that_keeps_nothing_is_refused_at_once_and_counted():
    pair = keeping()
    pair.load("a", D_IDS, "pin:a", engine_id="", prefix=PREFIX, run_s=1.0)
    assert pair.decode.failed == {"a": "the prefill node keeps nothing under names for peers"}
    assert pair.decode.count("failures", reason="not_held") == 1
    pair.assert_idle()


def test_what_came_of_pulls_is_counted_by_rank_0():
    pair = keeping()
    pair.decode.order(Orders(pulls=(("loaded", 48), ("missed", 0), ("loaded", 16))))
    pair.run(0.1)
    assert pair.decode.count("pulls", outcome="loaded") == 2
    assert pair.decode.count("pulls", outcome="missed") == 1
    assert pair.decode.count("pulled_tokens") == 64


def test_what_a_peer_has_on_disk_is_reported_with_the_time_of_disk_and_link():
    pair = asked_for()
    (link,) = pair.decode.transfers.decode.peers.links.values()
    link.peer.partners = (0, 1)
    pair.answer = None
    pair.find("b")
    pair.run(0.1)
    pair.say(m.PrefixFound(2, 0, 0, TOKENS, 4000, 1.5))
    pair.run(0.1)
    found = pair.found[-1]
    seconds = 1.5 + 2 * 4000 / pair.rate
    assert (found.num_tokens, found.disk_tokens, found.disk_s, found.error) == (0, TOKENS, seconds, None)


@pytest.mark.parametrize(
    "answer",
    [
        *((tokens, 1) for tokens in (TOKENS + BLOCK_TOKENS, TOKENS - 1)),
        *((BLOCK_TOKENS, 1, tokens, 1, 1.0) for tokens in (TOKENS + BLOCK_TOKENS, TOKENS - 1)),
        *((BLOCK_TOKENS, 1, TOKENS, 1, seconds) for seconds in (-1.0, math.inf, math.nan)),
    ],
)
def test_an_answer_that_cannot_be_right_is_counted_and_not_used(answer):
    pair = asked_for(answer=None)
    pair.say(m.PrefixFound(1, *answer))
    pair.run(0.1)
    assert (pair.found[0].num_tokens, pair.found[0].disk_tokens) == (0, 0)
    assert pair.decode.count("failures", reason="peer_message") == 1
