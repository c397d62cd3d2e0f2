"""A real pair whose two nodes are asked at once, by a real router and by hand, each in its own process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvconnect.node.children import BadAnswer, Children, fetch_json, read_metrics
from kvconnect.node.pair_demo import ask
from tests.pair_kit import (
    FOR_D,
    alone,
    assert_at_rest,
    grown,
    prefilled,
    prompt_of,
    route,
    serve,
    tokens,
    until,
)
from tests.ports import free_port

DEADLINE_S = 30
"""Half of what a load has."""
EXTRA = {"lease_s": 4, "peer_timeout_s": 4}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """P, D, a node alone, and a router that asks P and D at once. P listens where a new one can, too."""
    port = str(free_port())
    with Children(tmp_path_factory.mktemp("parallel")) as children:

        def start_prefill(name):
            return serve(children, name, "kv_producer", "--port", port, **EXTRA)

        made = {
            "prefill": start_prefill("prefill"),
            "decode": serve(children, "decode", "kv_consumer", *FOR_D, **EXTRA),
            "alone": alone(children),
        }
        urls = {name: child.wait_ready() for name, child in made.items()}
        urls["router"] = route(children, [urls["prefill"]], [urls["decode"]], "--flow", "parallel")

        def restart_prefill(meanwhile=lambda: None):
            made["prefill"].end(5)
            meanwhile()
            made["prefill"] = start_prefill("new")
            made["prefill"].wait_ready()
            until(lambda: not fetch_json(urls["router"] + "/ready")["missing"])

        yield {**urls, "restart": restart_prefill}


@pytest.fixture(autouse=True)
def at_rest(request):
    yield
    if "nodes" in request.fixturenames:
        nodes = request.getfixturevalue("nodes")
        assert_at_rest(nodes["prefill"], nodes["decode"])


def channel_of(nodes):
    """Where P is fetched from, as it says itself."""
    handed = prefilled(nodes["prefill"], [1, 2, 3])
    # Nobody will fetch it.
    tokens(nodes["decode"], [1, 2, 3], kv_transfer_params=handed)
    return {key: handed[key] for key in ("remote_host", "remote_port")}


def ask_d(nodes, prompt, transfer_id, channel):
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id, **channel}
    return ask(nodes["decode"], "gqa", prompt, kv_transfer_params=params)


def flows(nodes):
    names = ("sequential", "parallel", "resumed")
    return {name: grown(nodes["router"], {}, "router_flows_total", flow=name) for name in names}


def all_through_the_router(url, prompts, model="gqa", at_once=6):
    """The first alone, so that the router knows where P is fetched from."""
    with ThreadPoolExecutor(at_once) as pool:
        rest = pool.map(lambda prompt: tokens(url, prompt, model), prompts[1:])
        return [tokens(url, prompts[0], model), *rest]


def test_many_prompts_through_the_router_are_exact_and_each_is_moved_once(nodes):
    lengths = [1, 2, 17, 64, 130, 300, 500, 90] * 2
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    expected = [tokens(nodes["alone"], prompt) for prompt in prompts]
    before, ran = read_metrics(nodes["decode"]), flows(nodes)
    tokens(nodes["router"], prompt_of(20, "first"))
    assert all_through_the_router(nodes["router"], prompts) == expected
    # One token of 1 may repeat, and is then found in the local prefix cache or not.
    moved = grown(nodes["decode"], before, "transfers_total", direction="received", outcome="ok")
    assert moved >= len(prompts) - 2
    assert grown(nodes["decode"], before, "transfers_total", direction="received", outcome="failed") == 0
    now = flows(nodes)
    assert now["parallel"] - ran["parallel"] >= len(prompts)
    assert now["resumed"] == ran["resumed"]


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_either_node_may_be_asked_first(nodes, first):
    prompt = prompt_of(200, f"first {first}")
    channel = channel_of(nodes)
    with ThreadPoolExecutor(1) as pool:
        if first == "prefill":
            handed = prefilled(nodes["prefill"], prompt, transfer_id="by hand 1")
            assert handed["transfer_id"] == "by hand 1"
            answer = ask_d(nodes, prompt, "by hand 1", channel)
        else:
            asked = pool.submit(ask_d, nodes, prompt, "by hand 2", channel)
            time.sleep(0.4)
            prefilled(nodes["prefill"], prompt, transfer_id="by hand 2")
            answer = asked.result(DEADLINE_S)
    assert answer["choices"][0]["token_ids"] == tokens(nodes["alone"], prompt)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 199


def test_two_requests_of_one_transfer_id_on_one_decode_node_are_both_right(nodes):
    prompt = prompt_of(220, "twice")
    channel, before = channel_of(nodes), read_metrics(nodes["decode"])
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask_d, nodes, prompt, "twice", channel) for _ in range(2)]
        time.sleep(0.2)
        prefilled(nodes["prefill"], prompt, transfer_id="twice")
        got = [one.result(DEADLINE_S)["choices"][0]["token_ids"] for one in asked]
    assert got == [tokens(nodes["alone"], prompt)] * 2
    assert grown(nodes["decode"], before, "transfers_total", direction="received") == 1


def test_a_prompt_that_the_prefill_node_refuses_is_refused(nodes):
    with pytest.raises(BadAnswer, match="answered 400"):
        tokens(nodes["router"], [1] * 5000)


def test_a_prefill_node_that_was_restarted_is_found_again_and_nobody_notices(nodes):
    prompts = [prompt_of(150, f"restart {n}") for n in range(3)]
    expected = [tokens(nodes["alone"], prompt) for prompt in prompts]
    tokens(nodes["router"], prompt_of(30, "restart, before"))
    ran = flows(nodes)
    nodes["restart"]()
    assert [tokens(nodes["router"], prompt) for prompt in prompts] == expected
    now = flows(nodes)
    assert now["resumed"] - ran["resumed"] == 1
    assert now["parallel"] - ran["parallel"] == 3


def test_while_no_prefill_node_is_there_the_decode_node_answers(nodes):
    prompts = [prompt_of(150, f"alone {n}") for n in range(4)]
    expected = [tokens(nodes["alone"], prompt) for prompt in prompts]
    got = []
    before = read_metrics(nodes["router"])
    nodes["restart"](lambda: got.extend(tokens(nodes["router"], prompt) for prompt in prompts))
    assert got == expected
    assert grown(nodes["router"], before, "router_fallbacks_total") == 4
    ran = flows(nodes)

    def is_met():
        # Once the decode node has tried anew to reach a peer that was gone a moment ago.
        try:
            return tokens(nodes["router"], prompts[0]) == expected[0]
        except BadAnswer as error:
            assert "it was tried just now" in str(error)
            return False

    until(is_met, DEADLINE_S, every_s=0.2)
    assert flows(nodes) != ran, "and the prefill node is used again"


@pytest.mark.parametrize("model", ["sliding", "hybrid"])
def test_prompts_of_all_lengths_are_exact_and_long_ones_are_sent_while_they_are_computed(model, tmp_path):
    prompts = [prompt_of(length, length) for length in (30, 700, 150, 900, 260, 60, 1200, 199)]
    steps, extra = ("--max-num-batched-tokens", "128"), {"slot_bytes": 65536, "stream_min_tokens": 200}
    with Children(tmp_path) as children:
        made = [
            serve(children, "prefill", "kv_producer", *steps, model=model, **EXTRA, **extra),
            serve(children, "decode", "kv_consumer", *steps, *FOR_D, model=model, **EXTRA, **extra),
            alone(children, model=model),
        ]
        prefill, decode, single = (child.wait_ready() for child in made)
        router = route(children, [prefill], [decode], "--flow", "parallel")
        expected = [tokens(single, prompt, model) for prompt in prompts]
        assert all_through_the_router(router, prompts, model, at_once=3) == expected
        assert 1 <= grown(prefill, {}, "streamed_requests_total") <= 4
        assert grown(prefill, {}, "streamed_bytes_total") > 0
        assert grown(decode, {}, "transfers_total", outcome="failed") == 0
        assert_at_rest(prefill, decode)
