"""Two engines with real connectors that are asked at once: D's KV comes while P computes.

P's steps are done by hand, so that what happens between two of them is known.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager

import pytest

from tests.node.node_harness import MODEL_NAMES, Client, answer_of, make_client, make_prompt, until

BUDGET = 64
PROMPT = make_prompt(400, seed=5)


def node(name: str, role: str, **options) -> Client:
    extra = {
        "engine": "memory",
        "slot_bytes": options.pop("slot_bytes", 64 << 10),
        "stream_min_tokens": options.pop("stream_min_tokens", 100),
    }
    config = {"kv_role": role, "engine_id": name, "kv_connector_extra_config": extra}
    return make_client(kv_transfer_config=json.dumps(config), **options)


@contextmanager
def pair(**options):
    """P, whose prompts take several steps, and D, whose blocks have other ids."""
    prefill = node("P", "kv_producer", max_num_batched_tokens=BUDGET, **options)
    decode = node("D", "kv_consumer", reserved_blocks=61, **options)
    try:
        yield prefill, decode
    finally:
        for client in (prefill, decode):
            client.engine.worker.close()


def ask_both(prefill: Client, decode: Client, prompt: list[int], name: str = "a") -> None:
    transfer = {"transfer_id": name}
    prefill.submit(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False, **transfer})
    address = prefill.engine.worker.address()
    told = {"remote_host": address.host, "remote_port": address.port}
    decode.submit(name, prompt, 8, {"do_remote_prefill": True, "do_remote_decode": False, **transfer, **told})


def ask_and_wait(prefill: Client, decode: Client, prompt: list[int], name: str = "a") -> None:
    """Both are asked, and D's fetch waits at P."""
    ask_both(prefill, decode, prompt, name)
    until(lambda: prefill.engine.worker.state()["pending_fetches"], decode)


def counted(client: Client, name: str, *labels: str) -> float:
    return client.engine.worker.transfer._metrics.families[name].labels(*labels).value


def finish(prefill: Client, decode: Client, name: str = "a") -> list[int]:
    """Both legs to their ends; D's tokens. Then nothing is left."""
    until(lambda: prefill.last(name) and decode.last(name), prefill, decode)
    last = decode.last(name)
    assert last.failure is None, last.failure
    until(lambda: prefill.held == decode.held == 0, prefill, decode)
    for client in (prefill, decode):
        assert not any(client.engine.scheduler.hooks.state().values())
    return decode.tokens(name) + decode.drafts(name)


def blocks_of(client: Client, name: str) -> set[int]:
    return {block for ids in client.requests[name].blocks.ids for block in ids if block}


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_most_of_a_long_prompt_has_arrived_when_it_is_computed(model):
    with pair(model=model) as (prefill, decode):
        ask_and_wait(prefill, decode, PROMPT)
        while prefill.last("a") is None:
            prefill.engine.run_once()
            time.sleep(0.03)
        assert finish(prefill, decode) == answer_of(PROMPT, model=model)
        assert counted(prefill, "streamed_requests") == 1
        assert counted(prefill, "streamed_bytes") > 0


@pytest.mark.parametrize("options", [{"stream_min_tokens": 0}, {"stream_min_tokens": 500}])
def test_it_can_be_left_out(options):
    with pair(**options) as (prefill, decode):
        ask_and_wait(prefill, decode, PROMPT)
        assert finish(prefill, decode) == answer_of(PROMPT)
        assert counted(prefill, "streamed_requests") == 0


@pytest.mark.parametrize("model", ["gqa", "sliding", "hybrid"])
@pytest.mark.parametrize("after", [4, 6])
def test_a_prompt_that_is_preempted_while_it_is_sent_is_sent_again(model, after):
    with pair(model=model, enable_prefix_caching=False) as (prefill, decode):
        # The first fetch over a link waits for its calibration.
        ask_both(prefill, decode, make_prompt(150, seed=8), "calibrated")
        finish(prefill, decode, "calibrated")
        ask_and_wait(prefill, decode, PROMPT)
        for _ in range(after):
            prefill.engine.run_once()
            time.sleep(0.05)
        scheduler = prefill.engine.scheduler
        (request,) = scheduler.running
        lost = blocks_of(prefill, "a")
        scheduler._preempt(request)
        # Somebody else gets the blocks at once.
        prefill.submit("other", make_prompt(600, seed=9), 1)
        prefill.engine.take_arrived()
        scheduler.waiting.rotate(-1)
        prefill.engine.run_once()
        assert lost & blocks_of(prefill, "other")
        until(lambda: not prefill.engine.worker.state()["sendings"], decode)
        assert prefill.last("a") is None
        assert finish(prefill, decode) == answer_of(PROMPT, model=model)
        assert counted(prefill, "failures", "preempted") + counted(decode, "failures", "preempted") == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_while_it_is_sent_leaves_nothing(side):
    with pair() as (prefill, decode):
        ask_and_wait(prefill, decode, PROMPT)
        for _ in range(3):
            prefill.engine.run_once()
            time.sleep(0.03)
        (prefill if side == "prefill" else decode).engine.abort("a")
        until(lambda: decode.last("a") and prefill.last("a"), prefill, decode)
        if side == "prefill":
            # D computes it or says why not: whichever it is configured for.
            assert decode.last("a").failure is not None
        until(lambda: prefill.held == decode.held == 0, prefill, decode)
        ask_and_wait(prefill, decode, PROMPT[::-1], "b")
        assert finish(prefill, decode, "b") == answer_of(PROMPT[::-1])


def test_a_prefix_that_p_has_already_is_sent_first():
    with pair() as (prefill, decode):
        prefill.complete(PROMPT[:200], 1)
        ask_and_wait(prefill, decode, PROMPT)
        sent = prefill.engine.worker.transfer._metrics.copies.labels("sent")
        prefill.steps(1)
        until(lambda: prefill.last("a"), prefill)
        assert finish(prefill, decode) == answer_of(PROMPT)
        assert sent.value > 0
        assert prefill.last("a").cached_tokens >= 192


def test_several_prompts_at_once_are_exact():
    prompts = {f"r{n}": make_prompt(length, seed=n) for n, length in enumerate((40, 300, 120, 450, 90, 260))}
    with pair(model="sliding") as (prefill, decode):
        for name, prompt in prompts.items():
            ask_both(prefill, decode, prompt, name)
            prefill.engine.run_once()
        until(lambda: all(decode.last(name) for name in prompts), prefill, decode)
        for name, prompt in prompts.items():
            assert decode.last(name).failure is None
            assert decode.tokens(name) == answer_of(prompt, model="sliding")
        until(lambda: prefill.held == decode.held == 0, prefill, decode)
