"""Scheduler halves as they are configured: whose handles they take, and until when."""

from __future__ import annotations

import pytest

from kvconnect.addresses import RankAddress
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.halves.building import build_scheduler_half, configured_trust
from kvconnect.node.children import BadAnswer, fetch_json
from kvconnect.transfer.stack import StackTraits
from tests.halves.test_scheduler_half import ATTENTION, Request, load_of
from tests.ports import free_port

KEY, OTHER = "ab" * 32, "cd" * 32


def configured(role, key=KEY, now=1000.0, **extra):
    given = {"kv_role": role, "engine_id": role, "kv_connector_extra_config": extra}
    config = parse_kv_transfer_config(given)
    return build_scheduler_half(
        config,
        KVCacheConfig(100, (ATTENTION,)),
        StackTraits(held_back=7),
        directory=(RankAddress(0, "10.0.0.1", 5600),),
        trust=configured_trust(config, {"KVCONNECT_KEY": key}, lambda: now),
    )


def fetched_by(decode, **prefill):
    """What D orders for a request that P has computed."""
    half = configured("kv_producer", **prefill)
    request = Request("p", 47, {"do_remote_decode": True})
    half.new_request(request)
    assert half.prefill_tokens(request) == 40
    request.num_tokens = 41
    _, params = half.request_finished(request, ([1, 2, 3],), delivered=True)
    return load_of(params, 47, 40, decode=decode)


def test_a_node_takes_what_its_cluster_has_signed_in_its_time():
    load = fetched_by(configured("kv_consumer"))
    assert (load.refusal, load.peer[1:]) == (None, ("10.0.0.1", 5600))
    assert "handle" in fetched_by(configured("kv_consumer", key=OTHER)).refusal.text
    assert "expired" in fetched_by(configured("kv_consumer", now=1e6)).refusal.text


def test_a_node_fetches_from_whom_its_list_has():
    assert fetched_by(configured("kv_consumer", allow_peers=["10.0.0.1"])).refusal is None
    assert "allow_peers" in fetched_by(configured("kv_consumer", allow_peers=["10.0.0.2"])).refusal.text


def test_keys_are_those_of_the_configuration(tmp_path):
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    decode = configured("kv_consumer", key=OTHER, key_file=str(tmp_path / "key"))
    assert fetched_by(decode).refusal is None
    with pytest.raises(ConfigError, match="key_file"):
        configured("kv_consumer", key_file=str(tmp_path / "none"))


def bootstrapped(**extra):
    """A prefill node's half, and what a router is answered when it starts."""
    port = free_port()
    half = configured("kv_producer", bootstrap_port=port, **extra)
    return half, f"http://127.0.0.1:{port}/query"


def announced(decode, engine_id, num_tokens=47):
    """The load that a router in Mooncake's mode makes D order."""
    params = {"do_remote_prefill": True, "transfer_id": "xfer-1", "remote_engine_id": engine_id}
    params["remote_bootstrap_addr"] = "http://10.0.0.1:8998"
    return load_of(params, num_tokens, num_tokens - 7, decode=decode)


def test_a_router_in_mooncakes_mode_is_answered_where_the_node_is_fetched_from():
    half, url = bootstrapped()
    answer = fetch_json(url)
    assert answer.keys() == {"0"}
    assert answer["0"]["worker_addr"] == {"0": {"0": "tcp://10.0.0.1:5600"}}
    load = announced(configured("kv_consumer", now=1e9), answer["0"]["engine_id"])
    # Any engine there: after a restart of P alone the router goes on with what it was answered.
    assert (load.refusal, load.peer) == (None, ("", "10.0.0.1", 5600))
    half.drain()
    with pytest.raises(BadAnswer):
        fetch_json(url, timeout_s=2)


def test_what_another_cluster_or_connector_answered_is_refused():
    half, url = bootstrapped()
    engine_id = fetch_json(url)["0"]["engine_id"]
    half.drain()
    assert "signature is wrong" in announced(configured("kv_consumer", key=OTHER), engine_id).refusal.text
    assert "bootstrap_port" in announced(configured("kv_consumer"), "an-engine-of-mooncake").refusal.text
    refused = announced(configured("kv_consumer", allow_peers=["10.0.0.2"]), engine_id).refusal
    assert "allow_peers" in refused.text


def test_what_a_router_is_answered_opens_no_load():
    half, url = bootstrapped()
    engine_id = fetch_json(url)["0"]["engine_id"]
    half.drain()
    params = {"do_remote_prefill": True, "kvconnect_handle": engine_id}
    assert "expired" in load_of(params, 47, 40, decode=configured("kv_consumer")).refusal.text


def test_a_node_that_prefills_for_nobody_has_no_bootstrap():
    port = free_port()
    configured("kv_consumer", bootstrap_port=port)
    with pytest.raises(BadAnswer):
        fetch_json(f"http://127.0.0.1:{port}/query", timeout_s=2)
