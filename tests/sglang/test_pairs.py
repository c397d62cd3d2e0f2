"""A pair's answers equal those of one plain SGLang server, over both engines, while other clients leave."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed here; make test-sglang")

from kvconnect.node.children import fetch_json
from tests.ports import free_port
from tests.sglang.servers import (
    CHUNK_TOKENS,
    PAGE_TOKENS,
    WHEN_IMPORTED,
    Asked,
    generation,
    pair,
    random_prompt,
)
from tests.vllm.servers import answering, router

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

AT_ONCE = 8
PAGES = [page * PAGE_TOKENS + more for page in (1, 2, 3, 4, 8, 16) for more in (-1, 0, 1)]
CHUNKS = [chunk * CHUNK_TOKENS + more for chunk in (1, 2, 4) for more in (-1, 0, 1)]
LENGTHS = [1, 2, 3, 7, *PAGES, *CHUNKS, 100, 200, 300, 400, 500, 528, 600, 700, 768, 900, 1000, 1250]
LENGTHS += [1500, 1537, 2560, 2999, 3000]
PROMPTS = {length: random_prompt(length, length) for length in LENGTHS}


@pytest.fixture(scope="session")
def expected(plain):
    return {length: plain(prompt) for length, prompt in PROMPTS.items()}


OWN_PREFIX = "--disaggregation-decode-enable-radix-cache"
"""With it D keeps the pages of requests that have ended, and asks P for what follows them."""
ENGINES = {"nixl": (), "mooncake": (OWN_PREFIX,)}
BYTES = "kvconnect_transfer_bytes_total"


@pytest.fixture(scope="module", params=ENGINES)
def servers(request, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with pair(model, folder, request.param, decode_options=ENGINES[request.param]) as both:
        yield both


@contextmanager
def sglang_router(prefill, decode) -> Iterator[str]:
    """SGLang's own router in Python, before both."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--mini-lb"]
    command += ["--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", decode.url]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with answering(url, "/health", command, WHEN_IMPORTED, start_s=120, end_s=30):
        yield url


def test_every_prompt_while_clients_leave(expected, servers):
    prefill, decode = servers
    assert len(PROMPTS) == 48
    rng = random.Random(48)
    order, asked, left = rng.sample(LENGTHS, len(LENGTHS)), {}, []
    got = {}
    while order or asked:
        while order and len(asked) < AT_ONCE:
            length = order.pop()
            asked[length] = Asked(prefill, decode, PROMPTS[length])
            if len(order) % 4 == 0:
                leaver = Asked(prefill, decode, random_prompt(rng.randrange(1, 3000), 5000 + length))
                left.append((time.monotonic() + rng.random(), leaver))
        for moment, leaver in [one for one in left if one[0] <= time.monotonic()]:
            leaver.leave()
            left.remove((moment, leaver))
        length = next(iter(asked))
        got[length] = asked.pop(length).tokens()
    for _, leaver in left:
        leaver.leave()
    assert {length: tokens for length, tokens in got.items() if tokens != expected[length]} == {}
    prefill.wait_idle()
    decode.wait_idle()


def received_bytes(decode, before=-1.0):
    """What D has received, which is more than ``before``; its metrics come with a delay."""
    until = time.monotonic() + 20
    while True:
        time.sleep(2.5)
        found = decode.metrics()[BYTES]
        if found > before or time.monotonic() > until:
            return found


@pytest.mark.parametrize("servers", ["mooncake"], indirect=True)
def test_what_decode_has_itself_is_not_moved(plain, servers):
    prefill, decode = servers
    beginning = random_prompt(40 * PAGE_TOKENS, 70)
    whole = beginning + random_prompt(10 * PAGE_TOKENS + 5, 71)
    began = received_bytes(decode)
    assert Asked(prefill, decode, beginning).tokens() == plain(beginning)
    first = received_bytes(decode, began)
    assert Asked(prefill, decode, whole).tokens() == plain(whole)
    # All of it but the last page, and then nothing but the rest.
    assert 0 < received_bytes(decode, first) - first < (first - began) / 2
    assert Asked(prefill, decode, whole).tokens() == plain(whole)
    prefill.wait_idle()
    decode.wait_idle()


def test_through_kvconnect_router(plain, servers):
    prefill, decode = servers
    nodes = ("--prefill", prefill.url, "--decode", decode.url)
    prompts = [random_prompt(700, 80), random_prompt(90, 81), random_prompt(33, 82)]
    with router(*nodes, "--bootstrap-port", str(prefill.bootstrap_port)) as url:
        alone = fetch_json(url + "/generate", generation(prompts[0]), 60)
        assert alone["output_ids"] == plain(prompts[0])
        batch = fetch_json(url + "/generate", generation(prompts), 60)
        assert [one["output_ids"] for one in batch] == [plain(prompt) for prompt in prompts]
        body = {"model": "tiny", "prompt": prompts[1], "max_tokens": 8, "temperature": 0}
        text = fetch_json(url + "/v1/completions", body, 60)["choices"][0]["text"]
        assert text == fetch_json(plain.url + "/v1/completions", body, 60)["choices"][0]["text"]
    prefill.wait_idle()
    decode.wait_idle()


@pytest.mark.parametrize("servers", ["nixl"], indirect=True)
def test_through_the_router_of_sglang(plain, servers):
    prefill, decode = servers
    prompt = random_prompt(600, 90)
    with sglang_router(prefill, decode) as url:
        assert fetch_json(url + "/generate", generation(prompt), 60)["output_ids"] == plain(prompt)


@pytest.mark.parametrize("servers", ["nixl"], indirect=True)
def test_32_at_once(plain, servers):
    prefill, decode = servers
    prompts = [random_prompt(20 + 9 * n, 100 + n) for n in range(32)]
    asked = [Asked(prefill, decode, prompt) for prompt in prompts]
    assert [one.tokens() for one in asked] == [plain(prompt) for prompt in prompts]
    prefill.wait_idle()
    decode.wait_idle()
