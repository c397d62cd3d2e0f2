"""Batching, preemption, aborts and loads: none of them changes a token or loses a block."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import tests.node.wide_model  # noqa: F401
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, StateSpec
from kvconnect.errors import LocalError
from kvconnect.node.block_manager import BlockManager, BlockPool, RequestBlocks
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.request import EngineStep, Request, ScheduledChunk
from kvconnect.node.scheduler import Scheduler, align_tokens
from tests.node.node_harness import (
    DEVICES,
    MODEL_NAMES,
    CopyConnector,
    answer_of,
    make_client,
    make_prompt,
    prefilled,
)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_tokens_do_not_depend_on_concurrency_or_preemption(name):
    prompts = [make_prompt(length, seed=length) for length in (100, 170, 7, 120, 64)]
    alone = [answer_of(prompt, 32, model=name) for prompt in prompts]
    # Few blocks: the requests cannot all run to their end at once.
    num_blocks = {"mixed": 6, "sliding": 42}.get(name, 24)
    client = make_client(
        model=name, num_blocks=num_blocks, reserved_blocks=1, max_num_batched_tokens=48, max_model_len=256
    )
    assert client.together(prompts, 32) == alone
    assert client.engine.scheduler.counts.preemptions > 0
    assert client.held == 0


def test_steps_are_shared_within_their_limits():
    client = make_client(max_num_seqs=4, max_num_batched_tokens=32)
    execute, steps = client.engine.runner.execute, []
    client.engine.runner.execute = lambda step: (
        steps.append([len(chunk.token_ids) for chunk in step.chunks]) or execute(step)
    )
    client.together([make_prompt(50, seed=index) for index in range(6)], 10)
    assert max(map(sum, steps)) == 32
    assert max(map(len, steps)) == 4
    assert len(steps) <= 6 * 50 / 32 + 2 * 10 + 2


def test_abort_frees_blocks_at_every_stage():
    client = make_client(num_blocks=24, max_num_batched_tokens=32)
    client.submit("running", make_prompt(100), 50)
    client.submit("waiting", make_prompt(300), 50)
    client.steps(2)
    client.submit("new", make_prompt(10), 5)
    for name in ("waiting", "running", "new", "running", "unknown"):
        client.engine.abort(name)
    client.steps(1)
    assert client.held == 0
    assert client.last("running").finish_reason == "abort"
    assert client.last("waiting").finish_reason == "abort"
    assert client.engine.snapshot["counts"]["aborted"] == 3
    assert client.complete(make_prompt(100)) == answer_of(make_prompt(100))


def test_a_prompt_starts_only_when_all_of_it_has_room():
    client = make_client(num_blocks=21, max_num_batched_tokens=32)
    client.submit("first", make_prompt(150), 30)
    client.steps(1)
    client.submit("second", make_prompt(200, seed=1), 2)
    client.run("first", "second")
    assert client.engine.snapshot["counts"]["preemptions"] == 0


def test_ids_are_unique():
    client = make_client()
    client.submit("same", make_prompt(5), 50)
    client.steps(1)
    client.submit("same", make_prompt(5), 50)
    with pytest.raises(LocalError, match="'same' is already in use"):
        client.steps(1)


def test_what_can_never_fit_is_refused_with_numbers():
    engine = make_client(num_blocks=11, max_model_len=300).engine
    assert engine.refusal(100, 61) is None
    assert "needs 11 cache blocks, the node has 10" in engine.refusal(100, 62)
    assert "is 301 tokens, max_model_len is 300" in engine.refusal(300, 1)


@pytest.mark.parametrize("name", ["gqa", "sliding", "hybrid", "mixed"])
def test_the_largest_request_that_is_accepted_also_ends(name):
    client = make_client(model=name, num_blocks=40, max_model_len=1000, max_num_batched_tokens=40)
    prompt_length = max(n for n in range(1, 990) if client.engine.refusal(n, 10) is None)
    assert len(client.complete(make_prompt(prompt_length), 10)) in (10, 20)


def test_a_long_window_prompt_fits_a_cache_smaller_than_all_its_blocks():
    # 3 groups of 38 blocks are 114; the windowed groups never hold more than a part of theirs.
    client = make_client(model="sliding", num_blocks=70, max_num_batched_tokens=64)
    assert client.engine.refusal(600, 8) is None
    assert client.complete(make_prompt(600)) == answer_of(make_prompt(600), model="sliding")


# --- loads, their failures and aborts, and blocks that wait to be fetched ---

PROMPT = make_prompt(100)


def make_pair(name="gqa", prompt=PROMPT, *, prefill_options=None, **options):
    """A prefilled prompt on P, and D, whose loads copy P's pages. Returns both connectors and parameters."""
    prefill, params = prefilled(prompt, model=name, **(prefill_options or {}))
    decode = CopyConnector(prefill.client)
    decode.attach(model=name, reserved_blocks=11, **options)
    return prefill, decode, params


def loading(**options):
    """D, with a load that is under way, and its connector."""
    _, decode, params = make_pair(**options)
    decode.hold_loads = True
    decode.client.submit("loading", PROMPT, 8, params)
    decode.client.steps(2)
    return decode.client, decode


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*MODEL_NAMES, "wide"])
@pytest.mark.parametrize("length", [1, 2, 128, 129, 300])
def test_a_loaded_request_gives_the_tokens_of_a_local_one(name, length, device):
    prompt = make_prompt(length, seed=length)
    expected = answer_of(prompt, model=name, device=device)
    budget = {"max_num_batched_tokens": 100, "device": device}
    prefill, decode, params = make_pair(name, prompt, prefill_options=budget, device=device)
    p, d = prefill.client, decode.client
    is_held = length > 1 or name != "hybrid"
    assert (p.held > 0) == is_held
    assert d.complete(prompt, 8, params) == expected
    p.steps(1)
    assert p.held == d.held == 0
    if is_held:
        assert decode.calls[1] == ("alloc", "request-0", length - (name == "hybrid"))
        assert d.last("request-0").cached_tokens == length - 1


@pytest.mark.parametrize("name", ["gqa", "sliding", "hybrid"])
def test_a_load_is_needed_for_the_right_tokens(name):
    """The check above would be empty if the loaded bytes did not matter."""
    _, decode, params = make_pair(name)
    decode._copy = lambda _: None
    assert decode.client.complete(PROMPT, 8, params) != answer_of(PROMPT, model=name)


def test_a_local_prefix_is_not_loaded():
    _, decode, params = make_pair()
    d = decode.client
    expected = d.complete(PROMPT)
    assert d.complete(PROMPT, 8, params) == expected
    assert ("matched", "request-1", 96) in decode.calls
    assert ("alloc", "request-1", 4) in decode.calls


def test_blocks_wait_until_they_were_sent():
    prefill, _, params = make_pair()
    p = prefill.client
    p.steps(5)
    assert p.held == 7
    assert p.engine.snapshot["requests"]["waiting_to_be_fetched"] == 1
    assert params["blocks"] == p.requests["p"].blocks.snapshot()
    prefill.sent.append("p")
    p.steps(1)
    assert p.held == 0


def test_others_run_while_a_request_loads_and_its_blocks_are_not_reused_as_prefix():
    d, decode = loading()
    assert d.engine.snapshot["requests"]["waiting_for_kv"] == 1
    assert d.complete(PROMPT) == answer_of(PROMPT)
    assert d.last("request-1").cached_tokens == 0
    decode.release()
    d.run("loading")
    assert d.tokens("loading") == answer_of(PROMPT)


def test_an_abort_while_loading_keeps_the_blocks_until_they_are_quiet():
    d, decode = loading()
    d.engine.abort("loading")
    d.steps(3)
    assert decode.finished_calls("loading") == [False]
    assert d.last("loading").finish_reason == "abort"
    assert d.held == 7
    assert d.engine.snapshot["requests"]["aborted_while_loading"] == 1
    decode.fail_with = "cancelled"
    decode.release()
    d.steps(1)
    assert d.held == 0
    assert decode.finished_calls("loading") == [False]


@pytest.mark.parametrize("recompute", [True, False])
def test_a_failed_load_is_computed_here_or_ends_the_request_as_configured(recompute):
    _, decode, params = make_pair(recompute=recompute)
    decode.fail_with = "the peer left"
    d = decode.client
    d.submit("r", PROMPT, 8, params)
    d.run("r")
    failure = d.last("r").failure
    assert d.held == 0
    assert decode.finished_calls("r") == [recompute]
    if recompute:
        assert failure is None
        assert d.tokens("r") == answer_of(PROMPT)
        assert d.last("r").cached_tokens == 0
        assert [call[0] for call in decode.calls].count("matched") == 2
    else:
        assert (failure.status, failure.message) == (502, "the peer left")


def test_the_connector_may_ask_to_be_asked_again():
    _, decode, params = make_pair()
    decode.defer = 3
    d = decode.client
    d.submit("r", PROMPT, 8, params)
    d.submit("other", make_prompt(5), 8)
    assert d.engine.run_once() == 0.0, "the other one runs"
    d.run("r", "other")
    assert d.tokens("r") == answer_of(PROMPT)
    assert [call[0] for call in decode.calls if "r" in call].count("matched") == 4


def test_refused_parameters_end_the_request():
    connector = CopyConnector()
    client = connector.attach()
    client.submit("r", make_prompt(5), 8, {"bad": 1})
    client.run("r")
    assert client.last("r").failure.status == 400
    assert connector.finished_calls("r") == [False]


def test_loaded_requests_overtake_one_that_waits_for_blocks():
    """Without it, the request at the head and the loaded one behind it would wait for each other."""
    d, decode = loading(num_blocks=11 + 1 + 18, max_num_seqs=1)
    # Starts with 8 of the remaining 11 blocks, and runs out of them while the loaded one waits for a row.
    d.submit("long", make_prompt(120, seed=1), 60)
    d.steps(3)
    decode.release()
    d.run("loading", "long")
    assert d.requests["long"].preemptions > 0
    assert d.tokens("long") == answer_of(make_prompt(120, seed=1), 60)
    assert d.tokens("loading") == answer_of(PROMPT)
    assert d.held == 0


@pytest.mark.parametrize("name", ["gqa", "hybrid", "sliding"])
def test_a_preempted_loaded_request_is_computed_here(name):
    needed = {"gqa": 16, "hybrid": 14, "sliding": 44}[name]
    _, decode, params = make_pair(name, num_blocks=12 + needed)
    d = decode.client
    d.submit("first", make_prompt(120, seed=1), 30)
    d.steps(1)
    d.submit("r", PROMPT, 30, params)
    d.run("first", "r")
    assert d.requests["r"].preemptions > 0
    assert d.tokens("r") == answer_of(PROMPT, 30, model=name)


def test_every_request_is_finished_exactly_once():
    connector = CopyConnector()
    client = connector.attach(num_blocks=30)
    for index in range(12):
        client.submit(str(index), make_prompt(30 + index, seed=index), 20)
    client.steps(4)
    for index in (0, 5, 11):
        client.engine.abort(str(index))
    client.run(*map(str, range(12)))
    for index in range(12):
        assert connector.finished_calls(str(index)) == [index not in (0, 5, 11)]


def test_results_that_nothing_awaits_are_logged(caplog):
    connector = CopyConnector()
    client = connector.attach()
    connector.sent.append("stranger")
    client.steps(1)
    assert "reported stranger, of which no report is awaited" in caplog.text


# --- what a connector is asked and told of steps ---


@pytest.mark.parametrize(("name", "ends"), [("hybrid", [32, 64, 96, 100]), ("gqa", [90, 100])])
def test_a_chunk_ends_at_the_next_checkpoint_where_there_are_states(name, ends):
    connector, found = CopyConnector(), []
    connector.checkpoints = lambda request: (32, 64, 96)
    client = connector.attach(model=name, max_num_batched_tokens=90)
    update = client.engine.scheduler.update
    client.engine.scheduler.update = lambda step, sampled: (
        found.extend(chunk.start + len(chunk.token_ids) for chunk in step.chunks),
        update(step, sampled),
    )
    client.complete(PROMPT, 1)
    assert found == ends


def config(*sizes: int, states: int = 0) -> KVCacheConfig:
    groups = [KVCacheGroup((f"a{size}",), AttentionSpec(size, 1, 8, torch.bfloat16)) for size in sizes]
    state = StateSpec(512, ((4,),), (torch.float32,))
    return KVCacheConfig(8, (*groups, *(KVCacheGroup((f"s{index}",), state) for index in range(states))))


def test_blocks_align_at_their_least_common_multiple_and_states_do_not_count():
    assert align_tokens(config(16, 24, states=2).groups) == 48


class Half:
    """A scheduler half that writes down what it is told of steps."""

    due: ClassVar[dict[str, int]] = {"r": 40, "other": 0}

    def launched(self, step):
        self.told += [("state", *state[:4]) for state in step.states]
        self.told += [("computed", *computed) for computed in step.computed]


def test_a_step_is_told_once_something_came_of_it():
    half, manager = Half(), BlockManager(config(16, states=2), BlockPool(8), 100)
    scheduler = Scheduler(NodeOptions(), manager, half, recompute_failed_loads=False)
    request = scheduler.requests["r"] = Request("r", list(range(100)), 5, lambda _: None)
    request.blocks = RequestBlocks([[5, 6, 7], [8], [9]], [0] * 3, [0] * 3)

    def tell(start: int, end: int, **given) -> list[tuple]:
        half.told = []
        chunk = ScheduledChunk("r", 3, start, list(range(start, end)), False)
        scheduler.update(EngineStep(chunks=[chunk], **given), {})
        return half.told

    assert tell(0, 20, new_rows=[(3, [[5, 6], [8], [9]])]) == [("computed", "r", 20, [[5, 6], [8], [9]])]
    assert tell(20, 25) == []
    assert tell(25, 33, grown_rows=[(3, [[7], [], []])]) == [("computed", "r", 33, [[7], [], []])]
    assert tell(33, 39, grown_rows=[(4, [[7], [], []])]) == []
    assert tell(39, 41) == [("computed", "r", 41, None)]
    # The states come first, and at whole blocks of the others only.
    states = [("state", "r", group, 48, block) for group, block in ((1, 8), (2, 9))]
    assert tell(41, 48) == [*states, ("computed", "r", 48, None)]
