"""Requests whose KV other nodes are asked for by name, hook by hook."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.identity import Naming
from kvconnect.config import parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.outcome import Cause
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.handles import PeerTrust
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Found, Results
from tests.halves.test_scheduler_half import Request, connector, prefilled

NAMING = Naming("s", 16)
SOURCE, OTHER = "10.0.0.9:5600", "10.0.0.8:5600"


class Node:
    """A node that has ``sources``, with a clock of its own; requests are named for their prompts."""

    def __init__(self, *sources: str, role="kv_both", allow: Sequence[str] = (), **extra) -> None:
        self.now = 100.0
        traits = {"clock": lambda: self.now, "naming": NAMING, "names": self._names}
        trust = PeerTrust(AllowList(allow), 10)
        self.hooks = connector(role, trust=trust, sources=sources, **traits, **extra)
        self.hooks.build_orders()

    @staticmethod
    def _names(request, tokens):
        prompt = request.request_id.partition("#")[0]
        return [f"{prompt} {tokens} {end}".encode() for end in range(tokens, request.num_tokens + 1, tokens)]

    def ask(self, request, computed=0, local=0):
        if self.hooks.pulls is None:
            return self.hooks.matched_tokens(request, computed)[0]
        return self.hooks.pulls.matched_tokens(request, computed, local)

    def begin(self, name="a", num_tokens=100, params=None, reads=True, **asked):
        request = Request(name, num_tokens, params)
        self.hooks.new_request(request, reads=reads)
        return request, self.ask(request, **asked)

    def orders(self):
        return self.hooks.build_orders()

    def tell(self, request, num_tokens=0, **found):
        self.hooks.update_results(Results(found=(Found(request.request_id, num_tokens, **found),)))

    def offer(self, name="a", found=96, seconds=0.0, told=None, computed=0, **given):
        """A request for which a source was asked, and has so much, or says something else."""
        request, answer = self.begin(name, computed=computed, **given)
        assert answer is None
        self.orders()
        self.tell(request, found, seconds=seconds, **(told or {}))
        return request, self.ask(request, computed)

    def load(self, name="a", **given):
        request, count = self.offer(name, **given)
        self.admit(request, count)
        return request, self.orders()

    def admit(self, request, count):
        self.hooks.update_after_alloc(request, ([1, 2, 3, 4, 5, 6, 7],), count)

    def end(self, request, delivered=True):
        return self.hooks.request_finished(request, ([1, 2, 3],), delivered=delivered)

    def is_idle(self):
        return not any(self.hooks.state().values()) and not (self.hooks.pulls and self.hooks.pulls._computing)


def test_a_source_is_asked_for_what_is_not_at_hand_and_the_answer_is_loaded():
    node = Node(SOURCE)
    request, answer = node.begin(computed=16)
    assert answer is None
    (find,) = node.orders().finds
    assert (find.request_id, find.peer, find.max_tokens) == ("a", ("", "10.0.0.9", 5600), 99)
    assert (find.prefix.naming, find.prefix.start_tokens, len(find.prefix.names)) == (NAMING, 16, 6)
    assert node.ask(request, 16) is None
    assert not node.orders().finds, "once"
    node.tell(request, 64)
    assert node.ask(request, 16) == node.ask(request, 16) == 48
    node.admit(request, 48)
    (load,) = node.orders().loads
    assert (load.handle, load.peer, load.num_tokens) == ("pin:handle2", ("", "10.0.0.9", 5600), 64)
    assert load.refusal is None
    assert load.groups == (GroupBlocks(0, 1, (2, 3, 4)),)
    assert load.prefix == find.prefix
    node.hooks.update_results(Results(received=("a",)))
    orders = node.orders()
    assert orders.pulls == (("loaded", 48),)
    assert [note[1] for note in orders.notes] == ["loaded", "pull: loaded"]
    node.end(request)
    assert node.is_idle()


@pytest.mark.parametrize(
    "given", [{"params": {"do_remote_prefill": True}}, {"reads": False}, {"num_tokens": 16}, {"computed": 96}]
)
def test_what_has_a_handle_or_must_be_computed_or_is_short_is_not_asked_for(given):
    node = Node(SOURCE)
    request, answer = node.begin(**given)
    assert answer == 0
    assert not node.orders().finds
    node.end(request)
    assert node.is_idle()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_node_that_fetches_nothing_or_has_no_sources_asks_nobody(role):
    node = Node(role=role)
    assert node.begin()[1] == 0
    assert node.hooks.state().get("pulls", 0) == 0


def test_sources_of_a_client_are_checked_like_its_other_addresses(caplog):
    node = Node(SOURCE, allow=["10.0.0.8"])
    params = {"kv_sources": ["1.2.3.4:1", OTHER, "10.0.0.1:5600"]}
    request, answer = node.begin(params=params)
    assert answer is None
    orders = node.orders()
    assert [find.peer for find in orders.finds] == [("", "10.0.0.8", 5600)]
    assert orders.failures == ("peer_not_trusted", "peer_not_trusted")
    node.tell(request)
    assert node.ask(request) == 0, "of those that it names, none is left"
    assert node.orders().pulls == (("missed", 0),)
    for bad in ("10.0.0.8:5600", ["10.0.0.8"], [1], ["x y:1"], ["h:1"] * 65):
        request = Request(f"bad {bad}", 100, {"kv_sources": bad})
        node.hooks.new_request(request)
        assert node.orders().failures == ("parameters_refused",)


def test_what_operators_configured_needs_no_other_permission():
    node = Node(SOURCE, allow=["10.0.0.8"])
    assert node.begin(params={"kv_sources": [SOURCE]})[1] is None
    assert not node.orders().failures


def test_sources_are_asked_one_after_the_other_until_one_has_it():
    node = Node(SOURCE, OTHER)
    request, answer = node.offer(found=0)
    assert answer is None
    (find,) = node.orders().finds
    assert find.peer[1] == "10.0.0.8"
    node.tell(request, 48)
    assert node.ask(request) == 48
    node.end(request)
    assert node.orders().pulls == (("aborted", 0),)


def test_a_miss_is_not_asked_twice_within_a_second():
    node = Node(SOURCE)
    request, answer = node.offer("p#1", found=0)
    assert answer == 0
    node.end(request)
    assert node.begin("p#2")[1] == 0
    assert node.begin("q")[1] is None
    node.now += 1.1
    assert node.begin("p#3")[1] is None


@pytest.mark.parametrize("is_told", [True, False])
def test_a_source_that_does_not_answer_is_not_waited_for_and_rests(is_told):
    node = Node(SOURCE, OTHER)
    request, _ = node.begin()
    node.orders()
    node.now += 0.6
    if is_told:
        node.tell(request, error="nothing listens there")
        assert node.ask(request) is None, "the other one"
    else:
        assert node.ask(request) == 0
        assert node.orders().pulls == (("unanswered", 0),)
    node.end(request)
    node.begin("b")
    assert [find.peer[1] for find in node.orders().finds] == ["10.0.0.8"] * (1 + is_told)
    node.tell(request, 64)
    assert node.hooks.state()["pulls"] == 2, "of a request that is over"


def test_a_source_that_is_busy_is_asked_for_the_next_request():
    node = Node(SOURCE, OTHER)
    told = {"error": "it was asked for more names than one peer may", "is_busy": True}
    request, answer = node.offer(found=0, told=told)
    assert answer is None, "the other one"
    node.end(request)
    node.orders()
    node.begin("b")
    assert [find.peer[1] for find in node.orders().finds] == [SOURCE.rpartition(":")[0]]


def test_names_are_made_anew_as_a_source_makes_them_which_is_remembered():
    node = Node(SOURCE)
    _, answer = node.offer(found=0, told={"naming": Naming("s", 64)}, computed=80)
    assert answer == 0, "nothing new in names of 64"
    request, _ = node.begin("b", num_tokens=200, computed=80)
    (find,) = node.orders().finds
    assert (find.prefix.naming.tokens, find.prefix.start_tokens, len(find.prefix.names)) == (64, 64, 3)
    node.tell(request, 128)
    assert node.ask(request, 80) == 48
    node.hooks.update_after_alloc(request, (list(range(1, 14)),), 48)
    (load,) = node.orders().loads
    assert (load.num_tokens, load.groups) == (128, (GroupBlocks(0, 5, (6, 7, 8)),))
    assert load.prefix.start_tokens == 64


def test_a_source_whose_names_are_made_otherwise_is_left_alone_and_told_of_once(caplog):
    node = Node(SOURCE)
    with caplog.at_level(logging.WARNING):
        assert node.offer(found=0, told={"naming": Naming("t", 16)})[1] == 0
    assert "names KV by t and this node by s" in caplog.text
    assert node.orders().failures == ("other_names",)
    assert node.begin("b")[1] == 0


def computing(node, name, num_tokens, seconds):
    """A request that is computed, in so long."""
    request, answer = node.begin(name, num_tokens)
    if answer is None:
        node.orders()
        node.tell(request)
        assert node.ask(request) == 0
    node.hooks.update_after_alloc(request, ([1],), 0)
    node.now += seconds
    request.num_tokens += 1
    node.orders()
    node.end(request)


def test_what_takes_longer_to_load_than_to_compute_is_computed():
    node = Node(SOURCE)
    computing(node, "p", 1000, 1.0)
    _, count = node.offer("q", num_tokens=1000, found=960, seconds=2.0)
    assert count == 0
    assert node.orders().pulls == (("not_worth_it", 0),)
    assert node.offer("r", num_tokens=1000, found=960, seconds=0.1)[1] == 960
    assert node.begin("short", num_tokens=20)[1] is None
    node.orders()
    computing(node, "s", 1000, 0.01)
    for number in range(20):
        computing(node, f"s{number}", 1000, 0.01)
    assert node.begin("too short", num_tokens=20)[1] == 0, "not even asked for"


def test_a_source_whose_load_took_longer_than_computing_is_not_asked_for_a_minute():
    node = Node(SOURCE)
    computing(node, "p", 1000, 1.0)
    request, _ = node.load("q", num_tokens=1000, found=960, seconds=0.1)
    node.now += 3.0
    node.hooks.update_results(Results(received=("q",)))
    node.end(request)
    assert node.begin("r", num_tokens=1000)[1] == 0
    node.now += 61
    assert node.begin("s", num_tokens=1000)[1] is None


@pytest.mark.parametrize("changes_names", [True, False])
def test_nobody_is_asked_a_second_after_the_first_question(changes_names):
    """Sources that answer late in turn, or one that names KV otherwise each time, hold no request up."""
    node = Node(SOURCE, OTHER, "10.0.0.7:5600")
    request, answer = node.begin()
    asked = 0
    while answer is None:
        asked += len(node.orders().finds)
        node.now += 0.6
        tokens = 32 if asked % 2 else 16
        found = {"naming": Naming("s", tokens)} if changes_names else {"error": "it did not answer"}
        node.tell(request, **found)
        answer = node.ask(request)
        assert asked <= 2
    assert (answer, asked) == (0, 2)
    node.end(request)
    assert node.is_idle()


@pytest.mark.parametrize("is_rate_known", [True, False])
def test_nothing_is_loaded_over_a_link_that_is_not_measured_and_that_is_counted(is_rate_known):
    node = Node(SOURCE)
    if is_rate_known:
        computing(node, "p", 1000, 1.0)
        node.orders()
    request, count = node.offer("q", num_tokens=1000, found=960, seconds=math.inf)
    assert count == 0
    assert node.orders().pulls == (("unmeasured", 0),)
    node.end(request)
    assert node.begin("r", num_tokens=1000)[1] is None, "it is asked again at once"


def test_a_request_that_shares_its_beginning_waits_for_the_other_a_while():
    node = Node(SOURCE)
    first, _ = node.begin("p#1")
    second, answer = node.begin("p#2")
    assert answer is None
    assert len(node.orders().finds) == 1
    node.tell(first, 96)
    assert node.ask(first) == 96
    node.admit(first, 96)
    assert node.ask(second) is None, "it is being loaded"
    node.orders()
    node.hooks.update_results(Results(received=("p#1",)))
    assert node.ask(second, 96) == 0, "it is in the device's cache now"
    third, _ = node.begin("p#3")
    fourth, _ = node.begin("p#4")
    assert len(node.orders().finds) == 1
    node.now += 0.4
    assert node.ask(fourth) is None
    node.tell(third, 96)
    assert node.ask(third) == 96
    node.admit(third, 96)
    node.now += 0.2
    assert node.ask(fourth) is None
    assert len(node.orders().finds) == 1, "it asks for itself"


def test_a_load_that_failed_is_computed_and_not_pulled_again():
    node = Node(SOURCE)
    request, _ = node.load()
    node.hooks.update_results(Results(received=("a",), failed={"a": Cause.EVICTED("evicted")}))
    node.hooks.preempted("a")
    assert node.ask(request) == 0
    assert node.orders().pulls == (("failed", 0),)
    node.hooks.update_after_alloc(request, ([1],), 0)
    node.end(request)
    assert node.is_idle()


def test_a_request_that_was_loaded_says_nothing_of_how_fast_prompts_are_computed():
    node = Node(SOURCE)
    request, _ = node.load("a", num_tokens=1000, found=960)
    node.hooks.update_results(Results(received=("a",)))
    node.hooks.update_after_alloc(request, (list(range(1, 64)),), 0)
    node.now += 0.001
    request.num_tokens += 1
    node.orders()
    assert node.hooks.pulls._rate.tokens_per_s == 0
    assert node.begin("b", num_tokens=1000)[1] is None


def test_a_preempted_request_is_asked_for_anew():
    node = Node(SOURCE)
    request, _ = node.load()
    node.hooks.update_results(Results(received=("a",)))
    node.hooks.preempted("a")
    assert node.ask(request) is None
    assert len(node.orders().finds) == 1


@pytest.mark.parametrize("stage", ["asked", "found", "loading"])
def test_a_request_that_ends_at_any_stage_leaves_nothing(stage):
    node = Node(SOURCE)
    if stage != "loading":
        request, _ = node.begin() if stage == "asked" else node.offer()
        assert node.end(request, delivered=False) == (False, None)
    else:
        request, _ = node.load(params={"do_remote_decode": True})
        assert node.end(request) == (False, None), "what it computed is not whole"
        assert node.hooks.state()["pulling"] == 1
        assert node.orders().aborted == ("a",)
        node.hooks.update_results(
            Results(received=("a",), failed={"a": Cause.EVICTED("the request was aborted")})
        )
    assert node.orders().pulls == (("aborted", 0),)
    assert node.is_idle()


def test_blocks_for_another_number_of_tokens_are_refused():
    node = Node(SOURCE)
    request, count = node.offer()
    node.hooks.update_after_alloc(request, ([1, 2, 3],), count - 16)
    (load,) = node.orders().loads
    assert "80 of 96" in load.refusal.text


def test_what_was_found_before_caches_were_reset_is_not_loaded():
    node = Node(SOURCE)
    request, _ = node.offer()
    node.hooks.reset()
    assert node.ask(request) == 0
    node.end(request)
    assert node.is_idle()


def test_a_node_that_keeps_kv_by_name_tells_the_router_so():
    _, _, params = prefilled()
    node = Node(offload={"cpu_bytes": 1 << 20})
    request, _ = node.begin(params=params)
    assert node.end(request) == (False, {"kv_sources": ["10.0.0.1:5600"]})
    for changes in ({"role": "kv_consumer"}, {"offload": None}):
        other = Node(**{"offload": {"cpu_bytes": 1 << 20}, **changes})
        request, _ = other.begin(params=params)
        assert other.end(request) == (False, None)
    request, _ = node.begin("plain")
    assert node.end(request) == (False, None), "no router asked for it"
    request, _ = node.begin("aborted", params=params)
    assert node.end(request, delivered=False) == (False, None)


@pytest.mark.parametrize(
    ("role", "extra", "text"),
    [
        ("kv_producer", {}, "fetches nothing"),
        ("kv_both", {"engine": "none", "offload": {"cpu_bytes": 1 << 20}}, "fetches nothing"),
        ("kv_both", {"sources": ["nowhere"]}, "sources names 'nowhere'"),
    ],
)
def test_sources_that_cannot_be_asked_are_refused(role, extra, text):
    given = {"sources": [SOURCE], **extra}
    with pytest.raises(ConfigError, match=text):
        parse_kv_transfer_config({"kv_role": role, "kv_connector_extra_config": given})


def test_a_stack_that_makes_no_names_pulls_nothing():
    traits = {"clock": lambda: 0.0, "naming": NAMING, "names": Node._names}
    for missing in traits:
        hooks = connector("kv_both", sources=[SOURCE], **{**traits, missing: None})
        hooks.new_request(Request("a", 100))
        assert hooks.pulls is None


@given(
    here=st.integers(0, 6),
    more=st.integers(0, 6),
    here_s=st.floats(0.0001, 0.2),
    read_s=st.floats(0.0001, 0.5),
    local=st.integers(0, 6),
    per_s=st.sampled_from([100.0, 1000.0, 10_000.0]),
)
def test_of_host_memory_and_disk_that_is_loaded_which_saves_more(here, more, here_s, read_s, local, per_s):
    """Tokens in blocks of 16. What saves nothing is not loaded."""
    node = Node(SOURCE)
    node.hooks.pulls._rate.measured(1000, 1000 / per_s)
    request, answer = node.begin(local=local * 16)
    if answer is not None:
        return
    node.orders()
    there, disk_s = min(6, here + more) * 16 if more else 0, here_s + read_s
    node.tell(request, here * 16, seconds=here_s, disk_tokens=there, disk_s=disk_s)
    count = node.ask(request, 0, local * 16)

    def saved(num_tokens, seconds):
        """Beside the time that any pull takes, by how much it is quicker than to compute."""
        return (num_tokens - local * 16) / per_s - seconds - 0.01

    by_tokens = {0: 0.0}
    for num_tokens, seconds in ((here * 16, here_s), (there, disk_s)):
        if num_tokens > max(by_tokens):
            by_tokens[num_tokens] = saved(num_tokens, seconds)
    assert by_tokens[count or 0] >= 0
    # A longer one must be worth the time of a pull of its own.
    assert by_tokens[count or 0] >= max(by_tokens.values()) - 0.01 - 1e-9
