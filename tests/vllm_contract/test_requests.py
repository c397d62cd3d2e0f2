"""vLLM's own requests as both nodes see them: no two prompts share a handle, one prompt always does.

Which of them were made of one, which are prompts of one batch, and what a LoRA adapter is by its contents.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request

from kvconnect.addresses import RankAddress
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import parse_kv_transfer_config
from kvconnect.halves.building import Trust, build_scheduler_half
from kvconnect.transfer.orders import Results
from kvconnect.transfer.params import HANDLE_KEY
from kvconnect.transfer.stack import StackTraits
from kvconnect.vllm.offload import BlockHashes
from kvconnect.vllm.requests import Adapters, batch_of, named_with, parent_of, prompt_digest
from tests.call_count import calls_of
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


def test_a_long_prompt_costs_no_more_calls_than_a_short_one():
    costs = {calls_of(digest(), request("r", range(length)), length) for length in (1_000, 131_072)}
    assert len(costs) == 1


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


# Ids

CHOSEN = ["x", "a-1", "1_a", "a-1-0123abcd", "cmpl-a-1-0123abcd", "___prefill_addr_10.0.0.1:1_", "a b\nc-2"]
"""What clients may put between vLLM's own parts."""


@pytest.mark.parametrize("chosen", CHOSEN)
def test_children_have_their_parent_in_common_whatever_a_client_calls_it(chosen):
    for request_id in (f"cmpl-{chosen}-0-89abcdef", f"chatcmpl-{chosen}-89abcdef"):
        assert parent_of(request_id) == request_id
        assert {parent_of(f"{n}_{request_id}") for n in (0, 1, 12)} == {request_id}


@pytest.mark.parametrize("chosen", CHOSEN)
def test_prompts_of_a_batch_have_their_name_in_common_and_a_number(chosen):
    for child in ("", "0_", "3_"):
        assert batch_of(f"{child}chatcmpl-{chosen}-89abcdef") == ("", 0)
        for prompt in (0, 1, 2, 10, 2047):
            assert batch_of(f"{child}cmpl-{chosen}-{prompt}-89abcdef") == (f"cmpl-{chosen}", prompt)


def test_what_has_no_number_is_of_no_batch():
    assert batch_of("cmpl-a-1") == ("", 0), "nothing random: vLLM was told to keep ids as they come"


def test_vllm_makes_such_ids():

    for prompt in (0, 1):
        made = SimpleNamespace(
            request_id=f"cmpl-a-{prompt}",
            external_req_id=None,
            params=SamplingParams(n=2, output_kind=RequestOutputKind.FINAL_ONLY),
        )
        InputProcessor.assign_request_id(made)
        parent = ParentRequest(made)
        for index in range(2):
            child, _ = parent.get_child_info(index)
            assert parent_of(child) == made.request_id != "cmpl-a-1"
            assert batch_of(child) == ("cmpl-a", prompt)


# Adapters


def lora_in(folder, content=b"w", alpha=8, number=1, **more):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
    return SimpleNamespace(lora_name="a", lora_int_id=number, lora_path=str(folder), **more)


def test_the_same_contents_are_one_adapter_wherever_they_lie(tmp_path):
    first = Adapters().digest(lora_in(tmp_path / "a"))
    assert Adapters().digest(lora_in(tmp_path / "b" / "c", number=9)) == first
    (tmp_path / "a" / "README.md").write_text("more")
    assert Adapters().digest(lora_in(tmp_path / "a")) == first


@pytest.mark.parametrize("change", [{"content": b"v"}, {"alpha": 16}])
def test_other_weights_or_another_scale_under_one_name_and_path_are_another(tmp_path, change):
    first = Adapters().digest(lora_in(tmp_path / "a"))
    assert Adapters().digest(lora_in(tmp_path / "a", **change)) != first


def test_what_changes_under_a_loaded_adapter_is_exchanged_with_nobody(tmp_path):
    adapters, lora = Adapters(), lora_in(tmp_path / "a")
    first = adapters.digest(lora)
    assert adapters.digest(lora) == first
    lora_in(tmp_path / "a", b"other")
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
    changed = adapters.digest(lora)
    assert changed not in (first, Adapters().digest(lora))
    assert adapters.digest(lora) == changed
    lora.load_inplace = True
    assert adapters.digest(lora) == Adapters().digest(lora), "it was loaded anew after the warning"
    inplace = lora_in(tmp_path / "b", load_inplace=True, number=2)
    adapters.digest(inplace)
    lora_in(tmp_path / "b", b"other")
    os.utime(tmp_path / "b" / "adapter_model.safetensors", ns=(1, 1))
    assert adapters.digest(inplace) == Adapters().digest(inplace), "it was loaded anew"


def test_an_adapter_that_is_not_here_is_one_of_its_own():
    lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/not/there")
    adapters = Adapters()
    assert adapters.digest(lora) == adapters.digest(lora) != Adapters().digest(lora)


class View:
    def __init__(self, lora=None):
        self.block_hashes = [bytes([number]) * 32 for number in range(6)]
        self.lora_request = lora


def test_blocks_have_another_name_with_each_adapter_and_their_own_without(tmp_path):
    hashes = BlockHashes(16, Adapters())
    plain = View()
    assert hashes(plain, 16) is plain.block_hashes
    one, same, other = (
        View(lora_in(tmp_path / name, content, number=number))
        for number, (name, content) in enumerate([("a", b"1"), ("b", b"1"), ("c", b"2")], 1)
    )
    first = list(hashes(one, 16))
    assert first == list(hashes(same, 16)) != list(hashes(other, 16))
    assert not set(first) & set(plain.block_hashes)
    assert list(hashes(one, 32)) == first[1::2]
    one.block_hashes.append(b"z" * 32)
    assert list(hashes(one, 16))[:6] == first
    assert len(hashes(one, 16)) == 7
    assert named_with(named_with(b"abcdef", b"xy"), b"xy") == b"abcdef"
