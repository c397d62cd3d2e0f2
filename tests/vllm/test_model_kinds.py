"""Every kind of model over a pair of real vLLM servers: tokens, and the bytes that landed.

A decode server computes the last token of a prompt by itself, as a step of one token. Where vLLM's CPU
kernels give other roundings for that than for a whole prompt, the reference must be cut at the same place.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.vllm.plugin import vllm_version
from tests.vllm.comparing import assert_bytes_landed
from tests.vllm.servers import EXACT, Server, pair, random_prompt, reference_pair
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(1200), pytest.mark.servers]

# Where everything is run, each kind goes over both engines; else most kinds go over one of them.
ENGINES = {
    "gqa": "nixl",
    "sliding": "mooncake",
    "hybrid": "nixl",
    "eagle": "mooncake",
    "mtp": "nixl",
    "mla": "mooncake",
    "fp8": "mooncake",
}
OTHER = {"nixl": "mooncake", "mooncake": "nixl"}
# A draft's layers are there with MTP, too.
SHORT = {"gqa", "sliding", "hybrid", "mtp"}
CASES = [
    *(
        pytest.param((kind, engine), marks=[] if kind in SHORT else [pytest.mark.full])
        for kind, engine in ENGINES.items()
    ),
    *(pytest.param((kind, OTHER[engine]), marks=pytest.mark.full) for kind, engine in ENGINES.items()),
]
LAYERS = {"gqa": 4, "sliding": 6, "hybrid": 4, "eagle": 5, "mtp": 4, "mla": 3, "fp8": 4}
PREFIXES_ARE_KEPT = {"gqa", "sliding", "eagle", "fp8"}

# What is wrong where bytes lie shows in the first token, and wrong bytes are found by their digests. Six pass
# the end of a block in some of the prompts below.
SOME = {"max_tokens": 6}
# Around the borders of blocks (128 tokens), of windows (256) and of chunks (512).
BORDERS = [1, 2, 3, 5, 31, 64, 100, 127, 128, 129, 130, 200, 255, 256, 257, 300, 383, 384, 385, 400]
BORDERS += [500, 511, 512, 513, 514, 600, 639, 640, 641, 767, 768, 769, 900, 1000, 1023, 1024, 1025, 1026]
BORDERS += [1281, 1537, 1700]
# The same without windows.
UNWINDOWED = [1, 2, 3, 31, 126, 127, 128, 129, 256, 300, 384, 511, 512, 513, 514, 641, 1023, 1024, 1025, 1537]
# And for prompts that are computed in one piece, and by a second pair too.
WHOLE = [1, 2, 127, 128, 129, 513, 1537]
# Of these the prefill server's own last step has one token, as the decode server's first.
SPLIT_ALIKE = [513, 1025, 1537] * 2
if not vllm_version().startswith("0.30."):
    # There a prompt of one token begins with the state that a request before it left in its block.
    SPLIT_ALIKE += [1] * 2


class Reference:
    """What the tokens of a kind are compared with."""

    def __init__(self, kind: str, recipe, folder) -> None:
        # Recurrences round by how many tokens a step has; vLLM's CPU kernel of them takes bfloat16 alone.
        self.lengths = {"hybrid": SPLIT_ALIKE, "gqa": UNWINDOWED}.get(kind, BORDERS)
        self._kept: list[list[int]] = []
        if kind in ("mla", "mtp"):
            self.lengths = WHOLE
            # Here the CPU build computes prompts whole. Only another connector cuts the last token off.
            with reference_pair(recipe, folder) as (prefill, decode):
                self._kept = [decode.from_prefill(prefill, prompt, **SOME) for prompt in self.prompts()]

    def prompts(self) -> list[list[int]]:
        return [random_prompt(length, seed) for seed, length in enumerate(self.lengths)]

    def tokens(self, index: int, prompt: list[int], prefill: Server) -> list[int]:
        return self._kept[index] if self._kept else prefill.local_tokens(prompt, **SOME)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def servers(request, tmp_path_factory):
    kind, engine = request.param
    folder = tmp_path_factory.mktemp(kind)
    recipe = write_model(kind, folder)
    reference = Reference(kind, recipe, folder)
    # Windows over cached blocks round by how many tokens a step has.
    options, coding = EXACT if kind == "sliding" else (), "on" if kind == "gqa" else "off"
    with pair(recipe, folder, engine, options=options, exponent_coding=coding) as (prefill, decode):
        yield kind, prefill, decode, reference


def test_every_request_is_token_exact_and_every_byte_landed(servers):
    kind, prefill, decode, reference = servers
    wrong = []
    before = decode.loaded_tokens()
    for index, prompt in enumerate(reference.prompts()):
        got = decode.from_prefill(prefill, prompt, **SOME)
        expected = reference.tokens(index, prompt, prefill)
        if got != expected:
            wrong.append((len(prompt), got, expected))
    assert not wrong, f"{len(wrong)} of {len(reference.lengths)} differ: {wrong}"
    loaded = decode.loaded_tokens() - before
    # Windows and states leave the last token of each prompt to the decode server, and of one token all.
    assert loaded >= sum(reference.lengths) - len(reference.lengths), "KV was computed instead of loaded"
    at_least = len([length for length in reference.lengths if length > 1])
    layers = assert_bytes_landed(prefill, decode, at_least)
    assert len(layers) == LAYERS[kind]
    is_coded = "travels with coded exponents" in prefill.log.read_text()
    assert is_coded == (kind == "gqa")


def test_the_bytes_of_prompts_of_every_length_land(servers):
    _, prefill, decode, reference = servers
    if reference.lengths != SPLIT_ALIKE:
        pytest.skip("the test of all tokens used them")
    for length in BORDERS:
        prompt = random_prompt(length, 1000 + length)
        assert decode.from_prefill(prefill, prompt, max_tokens=1)
    assert_bytes_landed(prefill, decode, len(BORDERS) - 1)


def test_only_what_the_decode_server_lacks_is_loaded(servers):
    kind, prefill, decode, _ = servers
    if kind not in PREFIXES_ARE_KEPT:
        pytest.skip("vLLM's CPU build keeps no prefixes of this kind by itself")
    prompt = random_prompt(700, 1)
    decode.tokens(prompt[:400])
    before = decode.loaded_tokens()
    assert decode.from_prefill(prefill, prompt, **SOME) == prefill.local_tokens(prompt, **SOME)
    assert 0 < decode.loaded_tokens() - before < 700
    assert_bytes_landed(prefill, decode, 1)
