"""Real engines over loopback: what carried the bytes, how fast, and peers that settings refuse for it."""

from __future__ import annotations

import pytest

from kvconnect.node.children import Children, read_metrics
from tests.pair_kit import grown, prefilled, prompt_of, serve, tokens

PROMPT = list(range(1, 201))
DECODES = {
    "decode": {},
    "coded": {"exponent_coding": "on"},
    "strict": {"require_lane": "rdma"},
    "fast": {"min_gb_per_s": 1e6},
}
"""Decode nodes by name, with the settings that are theirs alone."""
LANES = {"nixl": ("shared_memory", "tcp"), "nixl over tcp": ("tcp",), "mooncake": ("tcp",)}
"""UCX takes TCP within a host where it may not read other processes' memory."""


@pytest.fixture(scope="module", params=["nixl", "nixl over tcp", "mooncake"])
def pair(request, tmp_path_factory):
    """The engine, its nodes' addresses, and their processes."""
    engine = request.param.partition(" ")[0]
    with pytest.MonkeyPatch.context() as patched, Children(tmp_path_factory.mktemp(engine)) as children:
        if request.param != engine:
            patched.setenv("UCX_TLS", "tcp")
        coded = {"engine": engine, "exponent_coding": "on"}
        made = {"prefill": serve(children, "prefill", "kv_producer", **coded)}
        for name, extra in DECODES.items():
            made[name] = serve(children, name, "kv_consumer", policy="recompute", engine=engine, **extra)
        yield request.param, {name: child.wait_ready() for name, child in made.items()}, made


def answered(urls, decode, prompt=PROMPT):
    """The tokens of a prompt that P prefills and a decode node goes on with."""
    return tokens(urls[decode], prompt, kv_transfer_params=prefilled(urls["prefill"], prompt))


def test_the_lane_that_carried_the_bytes_is_counted_and_logged_with_its_rate(pair):
    engine, urls, made = pair
    before = read_metrics(urls["decode"])
    got = [answered(urls, "decode") for _ in range(3)]
    assert got == [got[0]] * 3
    by_lane = {
        lane: grown(urls["decode"], before, "transfer_bytes_total", direction="received", lane=lane)
        for lane in LANES[engine]
    }
    received = grown(urls["decode"], before, "transfer_bytes_total", direction="received")
    assert sum(by_lane.values()) == received > 0
    (lane,) = (lane for lane, moved in by_lane.items() if moved)
    assert grown(urls["decode"], {}, "link_bytes_per_second", lane=lane) > 0
    assert grown(urls["prefill"], {}, "transfer_bytes_total", direction="sent", lane=lane) == received
    assert grown(urls["prefill"], {}, "chunk_seconds_count") > 0
    assert grown(urls["prefill"], {}, "lease_seconds_count") == 3
    for side in ("prefill", "decode"):
        lines = [one for one in made[side].output().splitlines() if "the link with" in one and "GB/s" in one]
        (line,) = [one for one in lines if "node decode" in one or "node prefill" in one][:1]
        assert lane in line
        assert ("deduced" if lane == "shared_memory" else "(lo; observed)") in line


def test_kv_that_travels_coded_gives_the_same_tokens_in_fewer_bytes(pair):
    engine, urls, made = pair
    prompt, got, moved = prompt_of(300, engine), {}, {}
    for name in ("decode", "coded"):
        before = read_metrics(urls[name])
        got[name] = answered(urls, name, prompt)
        moved[name] = grown(urls[name], before, "transfer_bytes_total", direction="received")
        assert moved[name] > 0
    assert got["coded"] == got["decode"]
    assert moved["coded"] / moved["decode"] == 6256 / 8192
    assert "travels with coded exponents" in made["prefill"].output()


@pytest.mark.parametrize(
    ("decode", "words"), [("strict", "require_lane is 'rdma'"), ("fast", "min_gb_per_s is 1e+06")]
)
def test_a_decode_node_refuses_the_prefill_node_once_by_name_and_computes_the_prompt(pair, decode, words):
    _, urls, made = pair
    expected = answered(urls, "decode")
    assert [answered(urls, decode) for _ in range(3)] == [expected] * 3
    assert grown(urls[decode], {}, "transfer_bytes_total", direction="received") == 0
    assert grown(urls[decode], {}, "failures_total", reason="transport_refused") == 3
    assert words in made[decode].output()


@pytest.mark.parametrize("engine", ["nixl", "mooncake"])
def test_between_cpu_caches_of_one_machine_slots_are_mapped_and_the_engine_carries_nothing(engine, tmp_path):
    with Children(tmp_path) as children:
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        made = [serve(children, *one, engine=engine, protocol="auto") for one in roles.items()]
        urls = dict(zip(roles, (child.wait_ready() for child in made), strict=True))
        assert answered(urls, "decode") == tokens(urls["prefill"], PROMPT)
        moved = grown(urls["decode"], {}, "transfer_bytes_total", direction="received")
        assert moved > 0
        for side, way in (("decode", "received"), ("prefill", "sent")):
            lane = {"direction": way, "lane": "shared_memory"}
            assert grown(urls[side], {}, "transfer_bytes_total", **lane) == moved
        assert grown(urls["decode"], {}, "link_bytes_per_second", lane="shared_memory") > 0
        assert all("shared_memory (its landing slots are mapped)" in child.output() for child in made)
