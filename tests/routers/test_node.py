"""kvconnect's own node behind vllm-router: what the node serves, neither chats nor several answers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvconnect.config import ExtraConfig
from kvconnect.node.children import Children, fetch_json, growth, read_metrics
from tests.pair_kit import alone, assert_at_rest, serve
from tests.ports import free_port
from tests.routers.vllm_router import (
    CONCURRENT,
    MODES,
    REQUEST_ID_LENGTH,
    complete,
    find_router,
    leave,
    pd_arguments,
    routed,
    stream,
    token_ids,
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def bootstrap_port():
    return free_port()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory, bootstrap_port):
    """A single node, a prefill and a decode node."""
    find_router()
    with Children(tmp_path_factory.mktemp("nodes")) as children:
        made = [alone(children)]
        made.append(start(children, "producer", bootstrap_port=bootstrap_port))
        # Ids of blocks that cannot be the same on both sides.
        made.append(start(children, "consumer", "--reserved-blocks", "61"))
        yield [node.wait_ready() for node in made]


def start(children, role, *options, **extra):
    return serve(children, role, f"kv_{role}", *options, protocol="auto", **extra)


@pytest.fixture(scope="module", params=MODES)
def router(request, nodes, bootstrap_port, tmp_path_factory):
    arguments = pd_arguments(request.param, *nodes[1:], bootstrap_port)
    with routed(tmp_path_factory.mktemp("router"), *arguments) as url:
        yield url


@pytest.fixture
def salt(request):
    """Begins each prompt: what the decode node has of the other mode is not loaded again."""
    return MODES.index(request.node.callspec.params["router"])


def body(prompt, **more):
    return {"model": "gqa", "prompt": prompt, "max_tokens": 12, **more}


def moved(url):
    """By a decode node: loads that went well, all others, and tokens of prompts that it did not compute."""
    samples = read_metrics(url)
    ok = growth({}, samples, "kvconnect_transfers_total", direction="received", outcome="ok")
    others = growth({}, samples, "kvconnect_transfers_total", direction="received") - ok
    # Of the answers' own counts the router makes those of the prefill node.
    return ok, others, fetch_json(url + "/debug/state")["counts"]["cached_tokens"]


def assert_all_came_over(nodes, router, prompts, ask):
    """``ask`` gets the same of the router as of a single node, and the decode node loads all of it."""
    single, *pair = nodes
    expected = [ask(single, prompt) for prompt in prompts]
    loads, failed, cached = moved(pair[1])
    with ThreadPoolExecutor(CONCURRENT) as pool:
        assert list(pool.map(lambda prompt: ask(router, prompt), prompts)) == expected
    assert_at_rest(*pair, within_s=5)
    # The last token of each is what a decode node begins with.
    tokens = sum(len(prompt) - 1 for prompt in prompts)
    assert moved(pair[1]) == (loads + len(prompts), failed, cached + tokens)


def ask_whole(url, prompt):
    return token_ids(complete(url, body(prompt)))


def ask_stream(url, prompt):
    return stream(url, body(prompt))


@pytest.mark.parametrize("number", [1, CONCURRENT])
def test_prompts_as_token_ids(nodes, router, salt, number):
    prompts = [[salt, number, at, *range(1, 150 + 20 * at)] for at in range(number)]
    assert_all_came_over(nodes, router, prompts, ask_whole)


def test_a_prompt_as_text(nodes, router, salt):
    assert_all_came_over(nodes, router, [f"{salt} is a text " * 40], ask_whole)


def test_streams(nodes, router, salt):
    assert_all_came_over(nodes, router, [[salt, 77, at, *range(200)] for at in range(3)], ask_stream)


def test_clients_that_leave_free_both_nodes(nodes, router, salt):
    leave(router, body([salt, 9, *range(1, 200)], max_tokens=2000), (0.0, 0.02, 0.1, 0.3))
    # Where the client left between the two requests, nobody tells the prefill node: its lease has to end.
    assert_at_rest(*nodes[1:], within_s=45)


def test_request_ids_are_as_long_as_with_names_of_pods(nodes, router):
    """Without it this file would test short ones."""
    answer = complete(router, body([5, *range(100)]))
    assert len(answer["id"].removeprefix("cmpl-")) == REQUEST_ID_LENGTH


def test_what_a_router_was_answered_outlives_a_restart_of_the_prefill_node(nodes, tmp_path):
    bootstrap_port, http_port, port = free_port(), str(free_port()), free_port()
    with Children(tmp_path) as children:
        prefill = start(children, "producer", "--port", http_port, port=port, bootstrap_port=bootstrap_port)
        decode = start(children, "consumer")
        pair = [prefill.wait_ready(), decode.wait_ready()]
        with routed(tmp_path, *pd_arguments("mooncake", *pair, bootstrap_port)) as url:
            assert_all_came_over([nodes[0], *pair], url, [[1, *range(150)]], ask_whole)
            prefill.end(20)
            prefill.start()
            prefill.wait_ready()
            # For so long a peer that was gone is left alone.
            time.sleep(ExtraConfig().retry_max_s)
            assert_all_came_over([nodes[0], *pair], url, [[2, *range(150)]], ask_whole)
