"""vLLM's own requests as both nodes see them: no two prompts share a handle, one prompt always does."""

from __future__ import annotations

import functools
import random
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvconnect.addresses import RankAddress
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import parse_kv_transfer_config
from kvconnect.halves.building import Trust, build_scheduler_half
from kvconnect.transfer.orders import Results
from kvconnect.transfer.params import HANDLE_KEY
from kvconnect.transfer.stack import StackTraits
from kvconnect.vllm.adapters import Adapters
from kvconnect.vllm.requests import prompt_digest
from tests.halves.test_scheduler_half import ATTENTION, HANDLES

PAIRS = 1000


def digest():
    """Of one server, which knows its own adapters."""
    return functools.partial(prompt_digest, adapters=Adapters())


ON_P = {"do_remote_decode": True}


def connector(role):
    half = build_scheduler_half(
        parse_kv_transfer_config({"kv_role": role, "engine_id": "P", "kv_connector_extra_config": {}}),
        KVCacheConfig(1000, (ATTENTION,)),
        StackTraits(prompt_digest=digest()),
        directory=(RankAddress(0, "10.0.0.1", 5600),),
        trust=Trust(HANDLES),
    )
    half.build_orders()
    return half


def request(name, tokens, params=None, *, images=(), **more):
    """``images`` are (identifier, offset, length)."""
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params} if params else None)
    features = [
        SimpleNamespace(identifier=image, mm_position=SimpleNamespace(offset=offset, length=length))
        for image, offset, length in images
    ]
    tokens = None if tokens is None else list(tokens)
    return Request(name, tokens, sampling, None, mm_features=features, **more)


def adapter(name="a", content=b"a"):
    folder = Path(tempfile.mkdtemp())
    (folder / "adapter_model.safetensors").write_bytes(content)
    return LoRARequest(lora_name=name, lora_int_id=1, lora_path=str(folder))


def handed_out(prefill, name, tokens, **more):
    """The parameters of a prompt after the prefill server computed it."""
    made = request(name, tokens, ON_P, **more)
    prefill.new_request(made)
    made.append_output_token_ids(5)
    _, params = prefill.request_finished(made, ([1] * 40,), delivered=True)
    prefill.build_orders()
    prefill.update_results(Results(sent=(name,)))
    return params


def wanted(decode, name, tokens, params, **more):
    """How many tokens the decode server would fetch."""
    made = request(name, tokens, params, **more)
    decode.new_request(made)
    count, _ = decode.matched_tokens(made, 0)
    decode.update_after_alloc(made, ([1] * 40,), 0)
    decode.request_finished(made, ([1] * 40,), delivered=True)
    return count


def test_a_thousand_pairs_of_prompts_of_one_length():
    rng = random.Random(15)
    prefill, decode = connector("kv_producer"), connector("kv_consumer")
    for number in range(PAIRS):
        count = rng.randint(1, 600)
        first = [rng.randrange(128_000) for _ in range(count)]
        second = list(first)
        for at in rng.sample(range(count), rng.choice((1, min(2, count), count))):
            second[at] = (second[at] + rng.randint(1, 127_999)) % 128_000
        params = handed_out(prefill, f"p{number}", first)
        assert wanted(decode, f"b{number}", second, dict(params)) == 0
        assert wanted(decode, f"a{number}", first, dict(params)) == count
    counted = decode.build_orders().failures
    assert counted == ("prompt_differs",) * PAIRS
    assert not any(decode.state().values())


IMAGES = (("cat", 3, 10), ("dog", 20, 10))


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({"lora_request": adapter()}, {}),
        ({"lora_request": adapter()}, {"lora_request": adapter("b", b"b")}),
        ({"lora_request": adapter()}, {"lora_request": adapter(content=b"b")}),
        ({"images": IMAGES}, {}),
        ({"images": IMAGES}, {"images": (("cat", 3, 10), ("fox", 20, 10))}),
        ({"images": IMAGES}, {"images": (("dog", 3, 10), ("cat", 20, 10))}),
        ({"images": IMAGES}, {"images": (("cat", 4, 10), ("dog", 20, 10))}),
    ],
)
def test_what_vllm_tells_equal_tokens_apart_by(here, there):
    tokens = list(range(50))
    params = handed_out(connector("kv_producer"), "p", tokens, **here)
    # A server each: one has a single adapter under a name.
    for more, count in ((there, 0), (here, 50)):
        assert wanted(connector("kv_consumer"), "r", tokens, dict(params), **more) == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_that_are_embeddings(dtype):
    embeds = torch.randn(50, 8, dtype=dtype)
    other = embeds.clone()
    other[31, 5] += 1
    prefill, decode = connector("kv_producer"), connector("kv_consumer")
    params = handed_out(prefill, "p", None, prompt_embeds=embeds)
    assert wanted(decode, "other", None, dict(params), prompt_embeds=other) == 0
    assert wanted(decode, "same", None, dict(params), prompt_embeds=embeds.clone()) == 50


def test_an_image_behind_what_is_handed_over_does_not_count():
    made = request("r", range(50), images=IMAGES)
    assert digest()(made, 20) == digest()(request("r", range(50), images=IMAGES[:1]), 20)


def test_a_prompt_of_131072_tokens_takes_a_moment():
    rng = random.Random(1)
    made = request("long", [rng.randrange(128_000) for _ in range(131_072)])
    took_s = []
    for _ in range(20):
        started = time.perf_counter()
        digest()(made, 131_072)
        took_s.append(time.perf_counter() - started)
    print(f"{min(took_s) * 1e3:.2f} ms")
    assert min(took_s) < 20e-3


def test_the_stub_of_a_request_that_never_came_here_gives_back_what_its_handle_stands_for():
    """vLLM submits it, with one token, and aborts it, for every client that leaves before its answer."""
    prefill, decode = connector("kv_producer"), connector("kv_consumer")
    tokens = range(100, 140)
    params = handed_out(prefill, "p", tokens)
    stub = request("s", [0], params, abort_immediately=True)
    decode.new_request(stub)
    decode.request_finished(stub, ([],), delivered=False)
    orders = decode.build_orders()
    assert [release.handle for release in orders.let_go] == [params[HANDLE_KEY]]
    assert not orders.failures
    assert not any(decode.state().values())


def test_the_stub_of_a_request_that_is_here_takes_nothing_from_it():
    prefill, decode = connector("kv_producer"), connector("kv_consumer")
    tokens = range(100, 140)
    params = handed_out(prefill, "p", tokens)
    real, stub = request("r", tokens, params), request("s", [0], params, abort_immediately=True)
    decode.new_request(real)
    decode.new_request(stub)
    decode.request_finished(stub, ([],), delivered=False)
    assert not decode.build_orders().let_go
    assert decode.matched_tokens(real, 0) == (40, True)
