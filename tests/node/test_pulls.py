"""Nodes that ask each other for KV by name: real workers and engines, in this process, over real sockets."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager

import pytest

from kvconnect.cache.identity import Prefix
from kvconnect.decode.sources import MISS_S
from kvconnect.engine.memory import MemoryEngine
from kvconnect.node.block_manager import PrefixHashes
from kvconnect.timeline import Moment
from tests.node.node_harness import MODEL_NAMES, answer_of, make_prompt, until
from tests.offload.half_kit import num_ready
from tests.offload.node_kit import DEADLINE_S, Keeper, make_keeper, patient

SHARED = ("gqa", "mla", "mixed", "sliding")
"""A node reuses no prefix of models with states."""
SLOW_BYTES_PER_S = 1e5
ASK_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}


def node(
    *sources: Keeper,
    keeps: bool = True,
    shares: bool = False,
    learns: bool = False,
    role: str = "kv_both",
    cpu_bytes: int = 64 << 20,
    **options,
) -> Keeper:
    """A node that asks others, and keeps what it computes, or ``shares`` what its device has of it."""
    extra = {"engine": "memory", "insecure": True, "slot_bytes": 64 << 10, "share_prefix_cache": shares}
    extra["sources"] = [address(source) for source in sources]
    extra["offload"] = {"cpu_bytes": cpu_bytes} if keeps else None
    config = {"kv_role": role, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
    options = {"enable_prefix_caching": shares, **options}
    return patient(make_keeper(json.dumps(config), **options), learns)


def address(client: Keeper) -> str:
    where = client.engine.worker.address()
    return f"{where.host}:{where.port}"


@contextmanager
def closing(*clients: Keeper):
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


@contextmanager
def source_and_target(source_options: dict | None = None, **options):
    """A node, and one that asks it; in the end nothing is under way at either, and both are closed."""
    source = node(**(source_options or {}))
    with closing(source, node(source, reserved_blocks=61, **options)) as both:
        yield both
        assert_at_rest(*both)


def pulled(client: Keeper) -> dict[str, int]:
    """What came of pulls, by outcome, and the tokens that they brought."""
    client.steps(2)
    metrics, is_counted = client.engine.worker.transfer._metrics, threading.Event()
    # After all orders: one that is being carried out is in no queue any more.
    client.engine.worker.transfer.call(lambda now: is_counted.set())
    assert is_counted.wait(DEADLINE_S)
    outcomes = {labels[0]: int(count) for labels, count in metrics.pulls.values().items()}
    return {**outcomes, "tokens": int(metrics.pulled_tokens.value)}


def assert_at_rest(*clients: Keeper) -> None:
    for client in clients:
        assert client.held == 0
        state = client.engine.scheduler.hooks.state()
        assert not any(state.values()), state
        assert not client.engine.worker.state()["loads"]


@pytest.mark.parametrize(("model", "keeps"), [*((model, True) for model in MODEL_NAMES), ("gqa", False)])
def test_a_node_gets_what_another_has_computed_and_answers_alike(model, keeps):
    with source_and_target({"model": model}, keeps=keeps, model=model) as (source, target):
        prompt = make_prompt(300, seed=1)
        answer = source.ask(prompt)
        assert target.ask(prompt) == answer == answer_of(prompt, model=model)
        assert target.cached >= 256
        brought = pulled(target)
        assert brought == {"loaded": 1, "tokens": target.cached}
        records = target.engine.worker.transfer._metrics.timeline.records()
        assert [record[5] for record in records if record[1] == f"{Moment.PULL}loaded"] == [target.cached]
        if keeps and model == "gqa":
            assert target.ask(prompt) == answer
            assert target.cached >= 256
            assert pulled(target) == brought, "it is kept here now"
        longer = [*prompt, *make_prompt(90, seed=2)]
        assert target.ask(longer) == answer_of(longer, model=model)
        other = make_prompt(200, seed=3)
        assert target.ask(other) == answer_of(other, model=model)
        assert target.cached == 0
        assert (brought := pulled(target)).get("missed"), brought


@pytest.mark.parametrize("model", SHARED)
def test_a_node_gets_what_only_the_device_of_another_has(model):
    shares = {"model": model, "keeps": False, "shares": True}
    with source_and_target(shares, **shares) as (source, target):
        prompt = make_prompt(300, seed=1)
        answer = source.ask(prompt)
        for _ in range(2):
            # At rest: its engine's loop does not run.
            assert target.ask(prompt) == answer == answer_of(prompt, model=model)
            assert target.cached >= 256
        assert pulled(target) == {"loaded": 1, "tokens": target.cached}, "its own device has it now"
        longer = [*prompt, *answer, *make_prompt(90, seed=2)]
        assert source.ask(longer) == answer_of(longer, model=model)
        kept = source.engine.worker.transfer.local.kept
        hashes = PrefixHashes(kept.naming.tokens)
        hashes.extend_to(longer)
        assert kept.find(Prefix(kept.naming, 0, tuple(hashes)), 398)[0] >= 320, "what was decoded there too"
        assert target.ask([*longer, 3]) == answer_of([*longer, 3], model=model)


def test_the_device_and_host_memory_of_a_node_give_what_each_of_them_has():
    both_places = {"shares": True, "enable_prefix_caching": True, "num_blocks": 40}
    with source_and_target(both_places) as (source, target):
        kept = source.engine.worker.transfer.local.kept
        prompts = [make_prompt(300, seed=seed) for seed in range(1, 5)]
        for prompt in prompts:
            source.ask(prompt)
        places = []
        for prompt in prompts:
            hold = kept.hold
            kept.hold = lambda *asked, hold=hold: places.append(held := hold(*asked)) or held
            assert target.ask(prompt) == answer_of(prompt)
            assert target.cached == 288
            kept.hold = hold
        assert [held.on_device for held in places] == [False, False, True, True]
        assert pulled(target) == {"loaded": 4, "tokens": 4 * 288}


def test_what_the_device_has_given_to_other_prompts_is_not_found():
    with source_and_target(
        {"keeps": False, "shares": True, "num_blocks": 24}, keeps=False, enable_prefix_caching=False
    ) as (source, target):
        prompts = [make_prompt(200, seed=seed) for seed in range(1, 7)]
        for prompt in prompts:
            source.ask(prompt)
        for prompt in prompts:
            assert target.ask(prompt) == answer_of(prompt)
        outcomes = pulled(target)
        assert outcomes["loaded"] >= 1
        assert outcomes["missed"] >= 4


@pytest.mark.parametrize("at", ["packed", "sent"])
def test_a_prompt_whose_blocks_are_given_away_while_it_is_pulled_is_computed(monkeypatch, at):
    """The blocks are overwritten at once, so that what is served late would be another prompt's KV."""
    shares = {"keeps": False, "shares": True, "num_blocks": 24}
    with source_and_target(shares, keeps=False) as (source, target):
        prompt, others = make_prompt(300, seed=1), [make_prompt(300, seed=seed) for seed in (2, 3)]
        source.ask(prompt)
        gone, advance = threading.Event(), MemoryEngine._advance
        kept = source.engine.worker.transfer.local.kept
        hold = kept.hold

        def overwritten(*asked):
            held = hold(*asked)
            if held is not None:
                begun.set()
                if at == "packed":
                    assert gone.wait(DEADLINE_S)
            return held

        def move_late(self, flight):
            if at == "packed" or gone.is_set() or not begun.is_set():
                advance(self, flight)

        begun = threading.Event()
        monkeypatch.setattr(kept, "hold", overwritten)
        monkeypatch.setattr(MemoryEngine, "_advance", move_late)
        target.submit("r", prompt)
        until(begun.is_set, target)
        for other in others:
            source.ask(other)
        gone.set()
        target.run("r")
        assert target.tokens("r") == answer_of(prompt, 8)
        assert pulled(target)["failed"] == 1


@pytest.mark.parametrize(("ours", "theirs"), [(16, 64), (64, 16), (16, 48)])
def test_blocks_of_another_size_are_pulled_by_names_of_the_sources_length(ours, theirs):
    with source_and_target({"block_size": theirs}, block_size=ours) as (source, target):
        for seed in (1, 2):
            prompt = make_prompt(300, seed=seed)
            source.ask(prompt)
            assert target.ask(prompt) == answer_of(prompt)
            assert target.cached == 299 // theirs * theirs
        assert pulled(target) == {"loaded": 2, "tokens": 2 * (299 // theirs * theirs)}


def test_a_source_that_is_killed_costs_a_prompt_and_no_request():
    source = node()
    target = node(source, reserved_blocks=61)
    with closing(source, target):
        first, second = make_prompt(300, seed=1), make_prompt(300, seed=2)
        source.ask(first)
        source.ask(second)
        assert target.ask(first) == answer_of(first)
        source.close()
        assert target.ask(second) == answer_of(second)
        assert target.cached == 0
        assert pulled(target)["unanswered"] == 1
        assert_at_rest(target)


def test_a_request_names_its_source_which_is_trusted_like_any_address():
    source, target = node(), node(reserved_blocks=61)
    with closing(source, target):
        prompt = make_prompt(300, seed=1)
        answer = source.ask(prompt)
        stranger = {"kv_sources": ["10.9.8.7:5600"]}
        assert target.ask(prompt[:200], params=stranger)
        assert target.cached == 0
        assert target.ask([*prompt[:-1], 5], params={"kv_sources": [address(source)]})
        assert target.cached == 288
        assert target.ask(prompt) == answer


def test_several_requests_of_one_prompt_are_pulled_once():
    with source_and_target() as (source, target):
        prompt = make_prompt(300, seed=1)
        answer = source.ask(prompt)
        names = [f"r{number}" for number in range(3)]
        for name in names:
            target.submit(name, prompt)
        target.run(*names)
        target.settle()
        assert all(target.tokens(name) == answer for name in names)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_client_that_leaves_while_its_kv_is_asked_for_or_loaded_leaves_nothing(steps):
    with source_and_target() as (source, target):
        prompt = make_prompt(600, seed=1)
        source.ask(prompt)
        target.submit("gone", prompt)
        target.steps(steps)
        target.engine.abort("gone")
        until(lambda: not (target.held or target.engine.worker.state()["loads"]), target)
        target.settle()
        assert target.ask(prompt) == source.ask(prompt)


def turn(prefill: Keeper, decode: Keeper, prompt: list[int], name: str, params: dict | None = None):
    """One request by both nodes: D's tokens, and what it told the router."""
    prefill.submit(name, prompt, 1, {**ASK_FOR_KV, **(params or {})})
    prefill.run(name)
    told = prefill.last(name).kv_transfer_params
    decode.submit(name, prompt, 30, dict(told))
    until(lambda: decode.last(name) and not (prefill.held or decode.held), decode, prefill)
    prefill.settle()
    decode.settle()
    return decode.tokens(name), decode.last(name).kv_transfer_params


@pytest.mark.parametrize("is_configured", [True, False])
def test_p_pulls_what_d_has_decoded_for_the_next_turn(is_configured):
    decode = node(reserved_blocks=61)
    prefill = node(*([decode] if is_configured else []))
    with closing(prefill, decode):
        prompt = make_prompt(200, seed=1)
        answer, told = turn(prefill, decode, prompt, "first")
        assert told == {"kv_sources": [address(decode)]}
        # Until D is not believed any more to lack what it did not have before this turn.
        time.sleep(MISS_S)
        second = [*prompt, *answer, *make_prompt(40, seed=2)]
        tokens, _ = turn(prefill, decode, second, "second", None if is_configured else told)
        assert tokens == answer_of(second, 30)
        # All but the last block's worth of the first turn, its answer included.
        assert prefill.last("second").cached_tokens == 224
        assert_at_rest(prefill, decode)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_decode_node_tells_what_came_of_hints_at_both_nodes(keeps):
    prefill, decode = node(), node(keeps=keeps, reserved_blocks=61)
    with closing(prefill, decode):
        pin = {"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {}}
        envelope = {"protocol_version": "1", "message_id": "m", "actions": [pin]}
        hints = {"kv_hints": envelope, "session_id": "s"}
        prompt = make_prompt(200, seed=1)
        prefill.submit("r", prompt, 1, {**ASK_FOR_KV, **hints})
        prefill.run("r")
        told = prefill.last("r").kv_transfer_params
        assert told["kv_hint_results"]["actions"][0]["outcome"] == "accepted"
        decode.submit("r", prompt, 30, {**hints, **told})
        decode.run("r")
        results = decode.last("r").kv_transfer_params["kv_hint_results"]
        assert results.pop("prefill") == told["kv_hint_results"]
        assert [done["num_tokens"] for done in results.get("actions", ())] == ([224] if keeps else [])


@pytest.mark.parametrize("is_configured", [True, False])
def test_nothing_is_pulled_over_a_link_that_is_slower_than_computing(monkeypatch, is_configured):
    advance = MemoryEngine._advance

    def move_slowly(self, flight):
        if self._clock() >= flight.submitted_at + flight.batch.total_bytes / SLOW_BYTES_PER_S:
            advance(self, flight)

    monkeypatch.setattr(MemoryEngine, "_advance", move_slowly)
    source = node()
    target = node(*([source] if is_configured else []), reserved_blocks=61)
    named = {} if is_configured else {"kv_sources": [address(source)]}
    with closing(source, target):
        prompts = [make_prompt(300, seed=seed) for seed in range(1, 5)]
        answers = [source.ask(prompt) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            # The first one too: neither the link nor how fast prompts are computed here is known by then.
            assert target.ask(prompt, params=named) == answer
            assert target.cached == 0
        link = target.engine.worker.transfer.decode.peers.links
        until(lambda: all(one.found for one in link.values()))
        (rate,) = {one.found.bytes_per_s for one in link.values()}
        assert rate == pytest.approx(SLOW_BYTES_PER_S, rel=0.2)
        last = [*make_prompt(100, seed=1), *make_prompt(200, seed=7)]
        answer = source.ask(last)
        assert target.ask(last, params=named) == answer
        outcomes = pulled(target)
        assert outcomes.pop("not_worth_it") >= 1
        # A configured source has measured its link when it was met.
        assert outcomes.pop("unmeasured", 0) or is_configured
        assert outcomes == {"tokens": 0}
        assert_at_rest(source, target)


def test_what_the_device_has_kept_longer_is_in_host_memory_again_once_it_is_used():
    """So that no peer need ask for what the device has."""
    first, others = make_prompt(300, seed=1), [make_prompt(300, seed=seed) for seed in range(2, 6)]
    probe = node()
    row_bytes = probe.engine.worker.offload.plan.classes[0].row_bytes
    probe.close()
    source = node(cpu_bytes=40 * row_bytes, enable_prefix_caching=True)
    with closing(source):
        index = source.engine.scheduler.hooks.offload.host.index
        source.ask(first)
        ours = list(index.classes[0].row_of[0])
        assert num_ready(index, 0, ours) == len(ours) >= 18
        for prompt in others:
            source.ask(prompt)
        assert num_ready(index, 0, ours) == 0, "host memory has lost it"
        source.ask([*first, 7])
        assert source.cached == 288, "the device has it"
        assert num_ready(index, 0, ours[:18]) == 18
