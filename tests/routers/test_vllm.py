"""Real vLLM servers behind vllm-router: every way to ask is exact, comes over, and leaves nothing held."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-routers")

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
from tests.vllm.comparing import assert_bytes_landed
from tests.vllm.servers import pair, random_prompt
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

CHAT = "/v1/chat/completions"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
# Several answers are sampled, and yet known: of two tokens that are equally likely the seed chooses.
TWO = {"n": 2, "temperature": 1, "top_k": 1, "seed": 5}
SOON_S = 5.0
"""Far less than a lease: blocks that nobody fetches would be in use for 30 s."""


@pytest.fixture(scope="module")
def bootstrap_port():
    return free_port()


@pytest.fixture(scope="module")
def servers(tmp_path_factory, bootstrap_port):
    find_router()
    folder = tmp_path_factory.mktemp("servers")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    # Where prompts that come together are cut otherwise than one that comes alone, sums round otherwise.
    options = ["--chat-template", str(template), "--max-num-batched-tokens", "8192"]
    prefill = {"bootstrap_port": bootstrap_port}
    recipe = write_model("gqa", folder)
    with pair(recipe, folder, "nixl", options=options, prefill=prefill, load_timeout_s=20) as both:
        yield both


@pytest.fixture(scope="module", params=MODES)
def router(request, servers, bootstrap_port, tmp_path_factory):
    prefill, decode = servers
    arguments = pd_arguments(request.param, prefill.url, decode.url, bootstrap_port)
    with routed(tmp_path_factory.mktemp("router"), *arguments) as url:
        yield url


@pytest.fixture
def seed(request):
    """Of all prompts: what the decode server has of the other mode is not loaded again."""
    return 10_000 * MODES.index(request.node.callspec.params["router"])


def body(**more):
    asked = {"model": "tiny", "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    return {**asked, "temperature": 0, **more}


def alone(prefill, asked, path="/v1/completions"):
    """What P answers by itself, nothing of before used, for a salt of its own; and its prompts' tokens."""
    answer = complete(prefill.url, {**asked, "cache_salt": f"alone {random.random()}"}, path)
    return token_ids(answer), answer["usage"]["prompt_tokens"]


def assert_came_over(servers, ask, bodies, path="/v1/completions"):
    """``ask`` gets of the router what P gives alone, and the decode server loads all prompts whole."""
    prefill, decode = servers
    expected = [alone(prefill, one, path) for one in bodies]
    before, loads = decode.loaded_tokens(), len(decode.observed("load"))
    with ThreadPoolExecutor(CONCURRENT) as pool:
        assert list(pool.map(ask, bodies)) == [tokens for tokens, _ in expected]
    prefill.wait_idle(SOON_S)
    decode.wait_idle(SOON_S)
    assert decode.loaded_tokens() - before == sum(count for _, count in expected)
    assert not decode.observed("failed")
    assert len(decode.observed("load")) - loads >= len(bodies)
    assert_bytes_landed(prefill, decode, loads + len(bodies))


@pytest.mark.parametrize("number", [1, CONCURRENT])
def test_prompts_as_token_ids(servers, router, seed, number):
    # Below 1024 tokens: longer ones round by how they are cut, and several at a time are cut otherwise.
    prompts = [random_prompt(300 + 30 * at, seed + 100 * number + at) for at in range(number)]
    bodies = [body(prompt=prompt) for prompt in prompts]
    assert_came_over(servers, lambda one: token_ids(complete(router, one)), bodies)


def test_a_prompt_as_text(servers, router, seed):
    bodies = [body(prompt=f"What router {seed} passes on is text. " * 12)]
    assert_came_over(servers, lambda one: token_ids(complete(router, one)), bodies)


def test_chats(servers, router, seed):
    bodies = [
        body(messages=[{"role": "user", "content": f"{seed + at} says hello. " * 20}]) for at in range(3)
    ]
    assert_came_over(servers, lambda one: token_ids(complete(router, one, CHAT)), bodies, CHAT)


def test_streams(servers, router, seed):
    bodies = [body(prompt=random_prompt(500, seed + 2000 + at)) for at in range(3)]
    assert_came_over(servers, lambda one: stream(router, one), bodies)


def test_two_answers(servers, router, seed):
    bodies = [body(prompt=random_prompt(500 + at, seed + 3000 + at), **TWO) for at in range(3)]
    assert_came_over(servers, lambda one: token_ids(complete(router, one)), bodies)


def test_two_answers_in_a_stream(servers, router, seed):
    bodies = [body(prompt=random_prompt(500 + at, seed + 3500 + at), **TWO) for at in range(3)]
    assert_came_over(servers, lambda one: stream(router, one), bodies)


def test_batches_of_prompts(servers, router, seed):
    bodies = [
        body(prompt=[random_prompt(300 + 50 * at, seed + 4000 + 10 * n + at) for at in range(4)])
        for n in range(3)
    ]
    assert_came_over(servers, lambda one: token_ids(complete(router, one)), bodies)


def test_two_answers_to_each_prompt_of_a_batch(servers, router, seed):
    bodies = [body(prompt=[random_prompt(300 + 50 * at, seed + 5000 + at) for at in range(3)], **TWO)]
    assert_came_over(servers, lambda one: token_ids(complete(router, one)), bodies)


def test_clients_that_leave_free_both_servers(servers, router, seed):
    prefill, decode = servers
    for number in range(2):
        asked = body(prompt=random_prompt(900, seed + 6000 + number), max_tokens=500)
        leave(router, asked, (0.0, 0.05, 0.2, 0.6))
    # Where the client left between the two requests, nobody tells the prefill server: its lease has to end.
    prefill.wait_idle(45)
    decode.wait_idle(SOON_S)


def test_request_ids_are_as_long_as_with_names_of_pods(router):
    """Without it this file would test short ones."""
    answer = complete(router, body(prompt=random_prompt(200, 7000)))
    assert len(answer["id"].removeprefix("cmpl-")) == REQUEST_ID_LENGTH
