"""Offload beside the rest: in a pair that hands over, over several ranks, with events and resets."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.ports import free_port

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

import zmq

from tests.vllm.comparing import assert_bytes_landed
from tests.vllm.servers import NIXL_CONNECTOR, OBSERVED, Server, pair, random_prompt, running
from tests.vllm.test_offload import (
    LENGTHS,
    USUAL_POOL,
    Asked,
    assert_alike,
    offload,
    options_of,
    overwrite,
    prompts_of,
    wait_kept,
)
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(1200), pytest.mark.full, pytest.mark.servers]

# Of these the prefill server's own last step has one token, as the decode server's first.
SPLIT_ALIKE = [513, 1025, 1537]


def through_the_pair(prefill: Server, decode: Server, prompt: list[int]) -> list[int]:
    return decode.tokens(prompt, kv_transfer_params=prefill.prefilled(prompt), max_tokens=12)


@pytest.mark.parametrize("kind", ["gqa", "hybrid"])
def test_one_connector_hands_over_and_keeps(tmp_path, kind):
    recipe = write_model(kind, tmp_path)
    keeping = {"offload": {"cpu_bytes": 512 << 20}}
    options = options_of(kind, 64 if kind == "hybrid" else USUAL_POOL)
    with pair(recipe, tmp_path, "nixl", options=options, **keeping) as (prefill, decode):
        prompts = [random_prompt(length, 70 + length) for length in SPLIT_ALIKE]
        expected = [prefill.local_tokens(prompt, max_tokens=12) for prompt in prompts]
        for round_ in range(3):
            restored = prefill.loaded_tokens()
            assert [through_the_pair(prefill, decode, prompt) for prompt in prompts] == expected
            # The second time and later the prefill server has them, though not in its pool.
            assert (prefill.loaded_tokens() > restored) is (round_ > 0)
            overwrite(prefill, kind)
            overwrite(decode, kind)
        assert_bytes_landed(prefill, decode, len(prompts))
        # What was fetched from a peer was kept too.
        before = decode.loaded_tokens()
        answers = Asked(decode, prompts)
        assert answers.tokens == expected
        assert answers.cached == [length // 128 * 128 for length in SPLIT_ALIKE]
        assert decode.loaded_tokens() - before == sum(answers.cached)
        for server in (prefill, decode):
            server.wait_idle()


@pytest.mark.parametrize("first", [True, False])
def test_a_connector_of_vllm_s_own_hands_over_and_ours_keeps_in_either_order(tmp_path, first):
    """vLLM passes on one handshake, and NixlConnector starts with no other than its own."""
    recipe = write_model("gqa", tmp_path)
    children = [offload(), NIXL_CONNECTOR] if first else [NIXL_CONNECTOR, offload()]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    servers = [
        Server(
            recipe,
            tmp_path,
            name,
            cpu,
            config,
            options_of("gqa", USUAL_POOL),
            environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        )
        for name, cpu in (("prefill", "0"), ("decode", "1"))
    ]
    with running(*servers) as (prefill, decode):
        prompts = [random_prompt(length, 70 + length) for length in SPLIT_ALIKE]
        expected = [prefill.local_tokens(prompt, max_tokens=12) for prompt in prompts]
        for round_ in range(2):
            restored = prefill.loaded_tokens()
            assert [through_the_pair(prefill, decode, prompt) for prompt in prompts] == expected
            assert (prefill.loaded_tokens() > restored) is (round_ > 0)
            overwrite(prefill, "gqa")
            overwrite(decode, "gqa")
        for server in servers:
            server.wait_idle()


def test_every_rank_keeps_its_own_shard(tmp_path):
    recipe = write_model("gqa", tmp_path)
    options = ["--tensor-parallel-size", "2"]
    prompts = prompts_of(seed=5)
    alone = offload(disk_path=str(tmp_path / "disk")) | {"kv_connector_module_path": OBSERVED}
    whole = Server(recipe, tmp_path, "whole", "0|1", None, [*options_of("gqa", None), *options])
    with running(whole):
        first, expected = Asked(whole, prompts), Asked(whole, prompts)
    small = Server(recipe, tmp_path, "small", "0|1", alone, [*options_of("gqa", USUAL_POOL), *options])
    with running(small):
        assert Asked(small, prompts).tokens == first.tokens
        overwrite(small, "gqa")
        assert_alike(small, Asked(small, prompts), expected)
        wait_kept(small)
        small.end()
        small.start()
        small.wait_ready()
        assert_alike(small, Asked(small, prompts), expected)


def test_what_is_kept_is_told_to_routers_and_a_reset_forgets_it(tmp_path):
    recipe, port = write_model("gqa", tmp_path), free_port()
    # With a star vLLM listens there.
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    server = Server(
        recipe,
        tmp_path,
        "small",
        "0",
        offload(),
        [*options_of("gqa", USUAL_POOL), "--kv-events-config", json.dumps(events)],
        environment={"VLLM_SERVER_DEV_MODE": "1"},
    )
    with running(server), zmq.Context() as context, context.socket(zmq.SUB) as heard:
        heard.connect(f"tcp://127.0.0.1:{port}")
        heard.setsockopt(zmq.SUBSCRIBE, b"")
        heard.setsockopt(zmq.RCVTIMEO, 2000)
        prompts = [random_prompt(length, 60 + length) for length in LENGTHS]
        Asked(server, prompts)
        overwrite(server, "gqa")
        got = Asked(server, prompts)
        assert sum(got.cached) > 0
        told = list(told_events(heard))
        on_device, on_host = (
            {
                name: tokens
                for event in told
                if event.get("medium") == medium
                for name, tokens in blocks(event)
            }
            for medium in ("GPU", "CPU")
        )
        assert len(on_host) >= sum(length // 128 for length in LENGTHS)
        assert on_host.items() <= on_device.items(), "both say the same of a block"
        server.fetch("/reset_prefix_cache?reset_external=true", {})
        gone = removed(told_events(heard, server))
        assert gone >= on_host.keys() - removed(told)
        overwrite(server, "gqa")
        assert Asked(server, prompts).cached == [0] * len(prompts)


def told_events(heard: zmq.Socket, server: Server | None = None):
    """What was published until now; events come with steps, so a short prompt makes some."""
    if server is not None:
        server.tokens([1, 2, 3], max_tokens=4)
    while True:
        try:
            *_, payload = heard.recv_multipart()
        except zmq.Again:
            return
        yield from msgspec.msgpack.decode(payload)[1]


def blocks(event):
    """By hash what a block holds, and after what."""
    if event["type"] == "BlockStored":
        size, before = event["block_size"], event["parent_block_hash"]
        for at, name in enumerate(event["block_hashes"]):
            yield name, (before, tuple(event["token_ids"][at * size : (at + 1) * size]))
            before = name


def removed(told):
    return {
        name
        for event in told
        if event["type"] == "BlockRemoved" and event["medium"] == "CPU"
        for name in event["block_hashes"]
    }
