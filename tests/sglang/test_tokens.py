"""A pair's answers equal those of one plain SGLang server, over both engines, while other clients leave."""

from __future__ import annotations

import random
import time

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed here; make test-sglang")

from tests.sglang.servers import CHUNK_TOKENS, PAGE_TOKENS, Asked, pair, random_prompt

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


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def servers(request, model, tmp_path_factory):
    with pair(model, tmp_path_factory.mktemp(request.param), request.param) as both:
        yield both


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
