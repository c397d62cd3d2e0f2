"""The configuration: vLLM's spelling, and an error that can be acted on for everything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.config import ExtraConfig, TransferConfig, parse_kv_transfer_config
from kvconnect.errors import ConfigError

FULL = {
    "kv_connector": "KVConnect",
    "kv_connector_module_path": "kvconnect.vllm",
    "kv_role": "kv_consumer",
    "engine_id": "decode-0",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"engine": "mooncake", "protocol": "tcp", "port": 5600, "lease_s": 12},
}


def test_every_key_of_the_spelling_is_read():
    config = parse_kv_transfer_config(json.dumps(FULL))
    assert config.engine_id == "decode-0"
    assert config.kv_load_failure_policy == "recompute"
    assert config.extra.engine == "mooncake"
    assert config.extra.lease_s == 12.0
    assert (config.is_producer, config.is_consumer) == (False, True)


def test_the_defaults_are_a_working_node():
    config = parse_kv_transfer_config({"kv_role": "kv_both", "engine_id": None})
    assert config.extra == ExtraConfig()
    assert config.is_producer
    assert config.is_consumer
    assert config.engine_id != parse_kv_transfer_config({"kv_role": "kv_both"}).engine_id


def test_the_value_is_frozen():
    with pytest.raises(AttributeError):
        parse_kv_transfer_config(FULL).kv_role = "kv_producer"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"kv_rol": 1},
            r"no key 'kv_rol' \(its value is 1\).*did you mean 'kv_role'\?.*accepted:.*engine_id",
        ),
        ({"kv_role": "prefill"}, r"kv_role is 'prefill': accepted: kv_both, kv_consumer, kv_producer"),
        ({"kv_role": None}, r"kv_role"),
        ({"kv_load_failure_policy": "retry"}, r"'retry': accepted: fail, recompute"),
        ({"kv_connector": "NixlConnector"}, r"'NixlConnector'; accepted: KVConnect"),
        ({"engine_id": 7}, r"engine_id is 7: Expected `str`"),
        ({"engine_id": ""}, r"engine_id is empty"),
        ({"kv_connector_extra_config": [1]}, r"kv_connector_extra_config is \[1\], it must be an object"),
        ({"kv_connector_extra_config": {"engin": "nixl"}}, r"did you mean 'engine'"),
        (
            {"kv_connector_extra_config": {"engine": "ucx"}},
            r"'ucx': accepted: auto, memory, mooncake, nixl, nvlink",
        ),
        ({"kv_connector_extra_config": {"path": "fast"}}, r"'fast': accepted: auto, direct, packed"),
        (
            {"kv_connector_extra_config": {"path": "packed", "num_slots": 0}},
            r"num_slots is 0, it must be at least 1",
        ),
        (
            {"kv_connector_extra_config": {"slot_bytes": 1000}},
            r"slot_bytes is 1000, accepted: multiples of 4096",
        ),
        ({"kv_connector_extra_config": {"pack_programs": -1}}, r"pack_programs is -1, it must be at least 0"),
        ({"kv_connector_extra_config": {"port": "5600"}}, r"port is '5600': Expected `int`"),
        ({"kv_connector_extra_config": {"port": 70000}}, r"port is 70000, accepted: 0"),
        ({"kv_connector_extra_config": {"lease_s": 0}}, r"lease_s is 0.0, it must be more than 0"),
        ({"kv_connector_extra_config": {"max_loads": 0}}, r"max_loads is 0, it must be at least 1"),
        (
            {"kv_connector_extra_config": {"stream_min_tokens": -1}},
            r"stream_min_tokens is -1, it must be at least 0",
        ),
        ({"kv_connector_extra_config": {"host": "0.0.0.0"}}, r"host is '0.0.0.0', which peers cannot"),
        (
            {"kv_connector_extra_config": {"insecure": True, "host": "10.0.0.1"}},
            r"insecure is true and host is '10.0.0.1'; accepted: a loopback address.*kvconnect keys new",
        ),
        (
            {"kv_connector_extra_config": {"insecure": True, "host": "a.name"}},
            r"insecure is true and host is 'a.name'",
        ),
        (
            {"kv_connector_extra_config": {"key_file": "a", "keys_dir": "b"}},
            r"has key_file and keys_dir; accepted: one of them",
        ),
        ({"kv_connector_extra_config": {"insecure": True, "key_file": "a"}}, r"has insecure and key_file"),
        ({"kv_connector_extra_config": {"allow_peers": "a"}}, r"allow_peers is 'a': Expected `array`"),
        ({"kv_connector_extra_config": {"quarantine_s": 1}}, r"quarantine_s is 1.0.*transfer_timeout_s"),
        ({"kv_connector_extra_config": {"load_timeout_s": 1}}, r"load_timeout_s is 1.0.*handshake_timeout_s"),
        ({"kv_connector_extra_config": {"lease_max_s": 1}}, r"lease_max_s is 1.0.*at least lease_s"),
        ({"kv_connector_extra_config": {"warm_peers": ["h"]}}, r"warm_peers names 'h', accepted: host:port"),
        ({"kv_connector_extra_config": {"warm_peers": ["h:0"]}}, r"warm_peers names 'h:0'"),
        ({"kv_connector_extra_config": {"warm_peers": ["h:65536"]}}, r"warm_peers names 'h:65536'"),
        ({"kv_connector_extra_config": {"max_batch_bytes": 1 << 40}}, r"max_batch_bytes.*max_inflight_bytes"),
    ],
)
def test_what_is_wrong_is_named(change, match):
    given_config = {**FULL, **change}
    with pytest.raises(ConfigError, match=match):
        parse_kv_transfer_config({key: value for key, value in given_config.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "match"), [("{", "not JSON"), ("[]", "must be a JSON object"), ("7", "JSON object")]
)
def test_text_that_is_no_object(text, match):
    with pytest.raises(ConfigError, match=match):
        parse_kv_transfer_config(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.dictionaries(st.sampled_from([*TransferConfig.__struct_fields__, "kv_rank"]), json_values, max_size=4),
    st.dictionaries(st.sampled_from([*ExtraConfig.__struct_fields__, "porrt"]), json_values, max_size=4),
)
def test_nothing_but_a_config_error_comes_out(top, extra):
    try:
        parsed = parse_kv_transfer_config({"kv_role": "kv_both", **top, "kv_connector_extra_config": extra})
    except ConfigError:
        return
    assert isinstance(parsed, TransferConfig)
