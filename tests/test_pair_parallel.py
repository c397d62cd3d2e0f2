"""A real pair whose two nodes are asked at once, by a real router and by hand, each in its own process."""

from __future__ import annotations

import http.client
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from kvconnect.node.children import BadAnswer, Children, fetch_json, growth, read_metrics
from kvconnect.node.demo import ask
from tests.ports import free_port
from tests.test_pair import node_options, until_ready

DEADLINE_S = 8


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """P, D, a node alone, and a router that asks P and D at once. P listens where a new one can, too."""
    port = str(free_port())
    with Children(tmp_path_factory.mktemp("parallel")) as children:
        prefill_options = [*node_options("prefill", "kv_producer"), "--port", port]
        made = {
            "prefill": children.start("prefill", *prefill_options),
            "decode": children.start(
                "decode", *node_options("decode", "kv_consumer"), "--reserved-blocks", "61"
            ),
            "alone": children.start("alone", "serve", "--model", "gqa", "--port", "0"),
        }
        urls = {name: child.wait_ready() for name, child in made.items()}
        options = ("--prefill", urls["prefill"], "--decode", urls["decode"], "--flow", "parallel")
        urls["router"] = children.start("router", "router", "--port", "0", *options).wait_ready()
        until_ready(urls["router"])

        def restart_prefill(meanwhile=lambda: None):
            old = made["prefill"]
            old.end(5)
            meanwhile()
            options = [
                text.replace('"engine_id": "prefill"', '"engine_id": "new"') for text in prefill_options
            ]
            made["prefill"] = children.start("prefill-again", *options)
            made["prefill"].wait_ready()
            until_ready(urls["router"])

        urls["restart"] = restart_prefill
        yield urls


@pytest.fixture(autouse=True)
def at_rest(nodes):
    yield
    deadline = time.monotonic() + 20
    while True:
        states = [fetch_json(nodes[name] + "/debug/state") for name in ("prefill", "decode")]
        keys = ("leases", "expected", "pending_fetches", "sendings", "loads")
        if not any(state["blocks"]["held"] or any(state["connector"][k] for k in keys) for state in states):
            return
        assert time.monotonic() < deadline, states
        time.sleep(0.1)


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def prompt_of(length, seed):
    return random.Random(seed).choices(range(512), k=length)


def channel_of(nodes):
    """Where P is fetched from, as it says itself."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    handed = ask(nodes["prefill"], "gqa", [1, 2, 3], max_tokens=1, kv_transfer_params=params)
    handed = handed["kv_transfer_params"]
    # Nobody will fetch it.
    ask(nodes["decode"], "gqa", [1, 2, 3], kv_transfer_params=handed)
    return {key: handed[key] for key in ("remote_host", "remote_port")}


def ask_p(nodes, prompt, transfer_id):
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return ask(nodes["prefill"], "gqa", prompt, max_tokens=1, kv_transfer_params=params)


def ask_d(nodes, prompt, transfer_id, channel):
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id, **channel}
    return ask(nodes["decode"], "gqa", prompt, kv_transfer_params=params)


def flows(nodes):
    metrics = read_metrics(nodes["router"])
    names = ("sequential", "parallel", "resumed")
    return {name: growth({}, metrics, "kvconnect_router_flows_total", flow=name) for name in names}


def test_many_prompts_through_the_router_are_exact_and_each_is_moved_once(nodes):
    prompts = [prompt_of(length, seed) for seed, length in enumerate([1, 2, 17, 64, 130, 300, 500, 90] * 2)]
    expected = [tokens(ask(nodes["alone"], "gqa", prompt)) for prompt in prompts]
    before, ran = read_metrics(nodes["decode"]), flows(nodes)
    got = [tokens(ask(nodes["router"], "gqa", prompts[0]))]
    with ThreadPoolExecutor(6) as pool:
        got += [tokens(answer) for answer in pool.map(lambda p: ask(nodes["router"], "gqa", p), prompts[1:])]
    assert got == expected
    after = read_metrics(nodes["decode"])
    # One token of 1 repeats, and is then found in the local prefix cache or not: it may be moved or not.
    moved = growth(before, after, "kvconnect_transfers_total", direction="received", outcome="ok")
    assert moved >= len(prompts) - 2
    assert growth(before, after, "kvconnect_transfers_total", direction="received", outcome="failed") == 0
    now = flows(nodes)
    assert now["parallel"] - ran["parallel"] >= len(prompts) - 1
    assert now["resumed"] == ran["resumed"]


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_either_node_may_be_asked_first(nodes, first):
    prompt = prompt_of(200, f"first {first}")
    expected = tokens(ask(nodes["alone"], "gqa", prompt))
    channel = channel_of(nodes)
    with ThreadPoolExecutor(1) as pool:
        if first == "prefill":
            handed = ask_p(nodes, prompt, "by hand 1")["kv_transfer_params"]
            assert handed["transfer_id"] == "by hand 1"
            answer = ask_d(nodes, prompt, "by hand 1", channel)
        else:
            asked = pool.submit(ask_d, nodes, prompt, "by hand 2", channel)
            time.sleep(0.4)
            ask_p(nodes, prompt, "by hand 2")
            answer = asked.result(DEADLINE_S)
    assert tokens(answer) == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 199


def test_two_requests_of_one_transfer_id_on_one_decode_node_are_both_right(nodes):
    prompt = prompt_of(220, "twice")
    expected = tokens(ask(nodes["alone"], "gqa", prompt))
    channel, before = channel_of(nodes), read_metrics(nodes["decode"])
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask_d, nodes, prompt, "twice", channel) for _ in range(2)]
        time.sleep(0.2)
        ask_p(nodes, prompt, "twice")
        assert [tokens(one.result(DEADLINE_S)) for one in asked] == [expected, expected]
    after = read_metrics(nodes["decode"])
    assert growth(before, after, "kvconnect_transfers_total", direction="received") == 1


def test_an_aborted_prefill_fails_the_decode_request_at_once(nodes):
    prompt = prompt_of(3900, "aborted")
    channel = channel_of(nodes)
    parts = urlsplit(nodes["prefill"])
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "aborted"}
    body = {"model": "gqa", "prompt": prompt, "max_tokens": 64, "kv_transfer_params": params}
    with ThreadPoolExecutor(1) as pool:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        asked = pool.submit(ask_d, nodes, prompt, "aborted", channel)
        deadline = time.monotonic() + DEADLINE_S
        while not fetch_json(nodes["prefill"] + "/debug/state")["connector"]["pending_fetches"]:
            assert time.monotonic() < deadline, "the fetch does not wait for the prefill"
            time.sleep(0.01)
        connection.close()
        with pytest.raises(BadAnswer, match="the prefill was aborted, or failed"):
            asked.result(DEADLINE_S)


def test_a_transfer_id_of_no_use_is_computed_and_not_held(nodes):
    before = read_metrics(nodes["prefill"])
    answer = ask_p(nodes, prompt_of(40, "bad id"), "é")
    assert len(tokens(answer)) == 1
    assert not answer["kv_transfer_params"]
    time.sleep(0.1)
    after = read_metrics(nodes["prefill"])
    assert growth(before, after, "kvconnect_failures_total", reason="transfer_id") == 1
    with pytest.raises(BadAnswer, match="kv_transfer_params.transfer_id is .*, accepted: printable ASCII"):
        ask_d(nodes, prompt_of(40, "bad id"), "é", {"remote_host": "h", "remote_port": 1})


def test_a_prompt_that_the_prefill_node_refuses_is_refused(nodes):
    with pytest.raises(BadAnswer, match="answered 400"):
        ask(nodes["router"], "gqa", [1] * 5000)


def test_a_prefill_node_that_was_restarted_is_found_again_and_nobody_notices(nodes):
    prompts = [prompt_of(150, f"restart {n}") for n in range(3)]
    expected = [tokens(ask(nodes["alone"], "gqa", prompt)) for prompt in prompts]
    ask(nodes["router"], "gqa", prompt_of(30, "restart, before"))
    ran = flows(nodes)
    nodes["restart"]()
    assert [tokens(ask(nodes["router"], "gqa", prompt)) for prompt in prompts] == expected
    now = flows(nodes)
    assert now["resumed"] - ran["resumed"] == 1
    assert now["parallel"] - ran["parallel"] == 3


def ask_until_met(nodes, prompt):
    """The router's answer, once the decode node has tried anew to reach a peer that was gone a moment ago."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return ask(nodes["router"], "gqa", prompt)
        except BadAnswer as error:
            if "it was tried just now" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_while_no_prefill_node_is_there_the_decode_node_answers(nodes):
    prompts = [prompt_of(150, f"alone {n}") for n in range(4)]
    expected = [tokens(ask(nodes["alone"], "gqa", prompt)) for prompt in prompts]
    got = []

    def ask_all():
        got.extend(tokens(ask(nodes["router"], "gqa", prompt)) for prompt in prompts)

    before = read_metrics(nodes["router"])
    nodes["restart"](ask_all)
    assert got == expected
    assert growth(before, read_metrics(nodes["router"]), "kvconnect_router_fallbacks_total") == 4
    ran = flows(nodes)
    assert tokens(ask_until_met(nodes, prompts[0])) == expected[0]
    assert flows(nodes) != ran, "and the prefill node is used again"
