"""Scheduler halves as they are configured: whose handles they take, and until when."""

from __future__ import annotations

import pytest

from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.orders import RankAddress
from kvconnect.scheduler.connector import SchedulerConnector
from kvconnect.scheduler.stack import StackTraits
from tests.scheduler.test_connector import ATTENTION, Request

KEY, OTHER = "ab" * 32, "cd" * 32


def configured(role, key=KEY, now=1000.0, **extra):
    return SchedulerConnector.configured(
        parse_kv_transfer_config({"kv_role": role, "engine_id": role, "kv_connector_extra_config": extra}),
        KVCacheConfig(100, (ATTENTION,)),
        StackTraits(held_back=7),
        directory=(RankAddress(0, "10.0.0.1", 5600),),
        environ={"KVCONNECT_KEY": key} if key else {},
        clock=lambda: now,
    )


def load_of(decode, **prefill):
    """What D orders for a request that P has computed."""
    half = configured("kv_producer", **prefill)
    request = Request("p", 47, {"do_remote_decode": True})
    assert half.prefill_tokens(request) == 40
    request.num_tokens = 41
    _, params = half.request_finished(request, ([1, 2, 3],), delivered=True)
    request = Request("d", 47, params)
    decode.new_request(request)
    decode.update_after_alloc(request, ([7, 8, 9],), 40)
    (load,) = decode.build_orders().loads
    return load


def test_a_node_takes_what_its_cluster_has_signed_in_its_time():
    load = load_of(configured("kv_consumer"))
    assert (load.refusal, load.host, load.port) == ("", "10.0.0.1", 5600)
    assert "handle" in load_of(configured("kv_consumer", key=OTHER)).refusal
    assert "expired" in load_of(configured("kv_consumer", now=1e6)).refusal


def test_a_node_fetches_from_whom_its_list_has():
    assert load_of(configured("kv_consumer", allow_peers=["10.0.0.1"])).refusal == ""
    assert "allow_peers" in load_of(configured("kv_consumer", allow_peers=["10.0.0.2"])).refusal


def test_keys_are_those_of_the_configuration(tmp_path):
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    decode = configured("kv_consumer", key=OTHER, key_file=str(tmp_path / "key"))
    assert load_of(decode).refusal == ""
    with pytest.raises(ConfigError, match="key_file"):
        configured("kv_consumer", key_file=str(tmp_path / "none"))
