"""Real engines over loopback: what carried the bytes, how fast, and peers that settings refuse for it."""

from __future__ import annotations

import json

import pytest

from kvconnect.node.children import Children, growth, read_metrics
from kvconnect.node.demo import PROTOCOLS, ask

PROMPT = list(range(1, 201))
ASK_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}
DECODES = {"decode": {}, "strict": {"require_lane": "rdma"}, "fast": {"min_gb_per_s": 1e6}}
"""Decode nodes by name, with the settings that are theirs alone."""
LANES = {"nixl": ("shared_memory", "tcp"), "nixl over tcp": ("tcp",), "mooncake": ("tcp",)}
"""UCX takes TCP within a host where it may not read other processes' memory."""


def options(engine, name, role, extra):
    transfer = {
        "kv_connector": "KVConnect",
        "kv_role": role,
        "engine_id": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"engine": engine, "port": 0, **extra},
    }
    return ["serve", "--model", "gqa", "--port", "0", "--kv-transfer-config", json.dumps(transfer)]


@pytest.fixture(scope="module", params=["nixl", "nixl over tcp", "mooncake"])
def pair(request, tmp_path_factory):
    """The engine, its nodes' addresses, and their processes."""
    engine = request.param.partition(" ")[0]
    with pytest.MonkeyPatch.context() as patched, Children(tmp_path_factory.mktemp(engine)) as children:
        if request.param != engine:
            patched.setenv("UCX_TLS", "tcp")
        by_engine = {"protocol": PROTOCOLS[engine]}
        made = {"prefill": children.start("prefill", *options(engine, "prefill", "kv_producer", by_engine))}
        for name, extra in DECODES.items():
            made[name] = children.start(name, *options(engine, name, "kv_consumer", by_engine | extra))
        yield request.param, {name: child.wait_ready() for name, child in made.items()}, made


def answered(urls, decode):
    """The tokens of a prompt that P prefills and a decode node goes on with."""
    first = ask(urls["prefill"], "gqa", PROMPT, max_tokens=1, kv_transfer_params=ASK_FOR_KV)
    return ask(urls[decode], "gqa", PROMPT, kv_transfer_params=first["kv_transfer_params"])["choices"][0][
        "token_ids"
    ]


def test_the_lane_that_carried_the_bytes_is_counted_and_logged_with_its_rate(pair):
    engine, urls, made = pair
    before = read_metrics(urls["decode"])
    tokens = [answered(urls, "decode") for _ in range(3)]
    after, sent = read_metrics(urls["decode"]), read_metrics(urls["prefill"])
    received = growth(before, after, "kvconnect_transfer_bytes_total", direction="received")
    by_lane = {
        lane: growth(before, after, "kvconnect_transfer_bytes_total", direction="received", lane=lane)
        for lane in LANES[engine]
    }
    assert sum(by_lane.values()) == received > 0
    (lane,) = (lane for lane, moved in by_lane.items() if moved)
    rate = growth({}, after, "kvconnect_link_bytes_per_second", lane=lane)
    assert rate > 1e7
    assert growth({}, sent, "kvconnect_transfer_bytes_total", direction="sent", lane=lane) == received
    assert growth({}, sent, "kvconnect_chunk_seconds_count") > 0
    assert growth({}, sent, "kvconnect_lease_seconds_count") == 3
    for side in ("prefill", "decode"):
        lines = [one for one in made[side].output().splitlines() if "the link with" in one and "GB/s" in one]
        (line,) = [one for one in lines if "node decode" in one or "node prefill" in one][:1]
        assert lane in line
        assert ("deduced" if lane == "shared_memory" else "(lo; observed)") in line
    assert tokens == [tokens[0]] * 3


@pytest.mark.parametrize(
    ("decode", "words"), [("strict", "require_lane is 'rdma'"), ("fast", "min_gb_per_s is 1e+06")]
)
def test_a_decode_node_refuses_the_prefill_node_once_by_name_and_computes_the_prompt(pair, decode, words):
    _, urls, made = pair
    expected = answered(urls, "decode")
    assert [answered(urls, decode) for _ in range(3)] == [expected] * 3
    after = read_metrics(urls[decode])
    assert growth({}, after, "kvconnect_transfer_bytes_total", direction="received") == 0
    assert growth({}, after, "kvconnect_failures_total", reason="transport_refused") == 3
    assert words in made[decode].output()


@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_between_cpu_caches_of_one_machine_slots_are_mapped_and_the_engine_carries_nothing(engine, tmp_path):
    with Children(tmp_path) as children:
        made = {
            "prefill": children.start("prefill", *options(engine, "prefill", "kv_producer", {})),
            "decode": children.start("decode", *options(engine, "decode", "kv_consumer", {})),
        }
        urls = {name: child.wait_ready() for name, child in made.items()}
        expected = ask(urls["prefill"], "gqa", PROMPT)["choices"][0]["token_ids"]
        assert answered(urls, "decode") == expected
        received, sent = read_metrics(urls["decode"]), read_metrics(urls["prefill"])
        moved = growth({}, received, "kvconnect_transfer_bytes_total", direction="received")
        by_lane = {"direction": "received", "lane": "shared_memory"}
        assert growth({}, received, "kvconnect_transfer_bytes_total", **by_lane) == moved > 0
        by_lane["direction"] = "sent"
        assert growth({}, sent, "kvconnect_transfer_bytes_total", **by_lane) == moved
        assert growth({}, received, "kvconnect_link_bytes_per_second", lane="shared_memory") > 1e7
        for child in made.values():
            assert "shared_memory (its landing slots are mapped)" in child.output()
