"""The configuration: vLLM's spelling, and an error that can be acted on for everything else."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.addresses import split_address
from kvconnect.config import ExtraConfig, Limits, OffloadConfig, TransferConfig, parse_kv_transfer_config
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
        ({"kv_connector": "NixlConnector"}, r"'NixlConnector': accepted: KVConnect"),
        ({"engine_id": 7}, r"engine_id is 7: Expected `str`"),
        ({"engine_id": ""}, r"engine_id is empty"),
        ({"kv_connector_extra_config": [1]}, r"kv_connector_extra_config is \[1\], it must be an object"),
    ],
)
def test_what_is_wrong_is_named(change, match):
    given_config = {**FULL, **change}
    with pytest.raises(ConfigError, match=match):
        parse_kv_transfer_config({key: value for key, value in given_config.items() if value is not None})


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"engin": "nixl"}, r"did you mean 'engine'"),
        ({"engine": "ucx"}, r"'ucx': accepted: auto, memory, mooncake, nixl, none"),
        ({"slot_bytes": 1000}, r"slot_bytes is 1000: .*multiple of 4096"),
        ({"port": "5600"}, r"port is '5600': Expected `int`"),
        ({"port": 70000}, r"port is 70000: Expected `int` <= 65535"),
        ({"max_loads": 1}, r"has no key 'max_loads'"),
        ({"host": "0.0.0.0"}, r"host is '0.0.0.0', which peers cannot"),
        (
            {"insecure": True, "host": "10.0.0.1"},
            r"insecure is true, and host or bind is '10.0.0.1'; accepted: loopback.*kvconnect keys new",
        ),
        ({"insecure": True, "host": "a.name"}, r"insecure is true, and host or bind is 'a.name'"),
        ({"key_file": "a", "keys_dir": "b"}, r"has key_file and keys_dir; accepted: one of them"),
        ({"insecure": True, "key_file": "a"}, r"has insecure and key_file"),
        ({"load_timeout_s": 1}, r"load_timeout_s is 1.0.*half of peer_timeout_s"),
        ({"lease_max_s": 1}, r"lease_max_s is 1.0.*at least lease_s"),
        ({"warm_peers": ["h"]}, r"warm_peers names 'h', accepted: host:port"),
        ({"offload": {}}, r"offload.cpu_bytes is missing; it has no default"),
        ({"offload": [1]}, r"offload is \[1\], it must be an object of settings"),
        ({"path": "packed"}, r"path is 'packed', and is no setting any more: .* leave it out"),
    ],
)
def test_what_is_wrong_with_a_setting_is_named(extra, match):
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config.*" + match):
        parse_kv_transfer_config({**FULL, "kv_connector_extra_config": extra})


ZERO_IS_FINE = {
    *("port", "bootstrap_port", "min_gb_per_s", "slot_bytes", "stream_min_tokens", "checkpoint_tokens"),
    *("disk_bytes", "store_bytes", "pin_quota", "peer_share", "park_share", "park_after_s"),
}
"""Of all other numbers the least is 1, or more than 0."""


@pytest.mark.parametrize("value", [-1, 0, [{}]])
def test_a_setting_of_a_wrong_type_or_out_of_its_bounds_is_named(value):
    wrong = {}
    for kind in (ExtraConfig, OffloadConfig):
        hidden = {*Limits.__struct_fields__, "offload"}
        fields = [field for field in msgspec.structs.fields(kind) if field.name not in hidden]
        if value != [{}]:
            no_default = {"cpu_bytes", "peer_share"}
            fields = [one for one in fields if type(one.default) in (int, float) or one.name in no_default]
        wrong[kind] = {one.name: value for one in fields if value or one.name not in ZERO_IS_FINE}
    offload = {"cpu_bytes": 1, **wrong[OffloadConfig]}
    with pytest.raises(ConfigError) as caught:
        parse_kv_transfer_config(with_offload(offload, **wrong[ExtraConfig]))
    named = {*wrong[ExtraConfig], *(f"offload.{name}" for name in wrong[OffloadConfig])}
    assert not [
        name for name in named if f"kv_connector_extra_config.{name} is {value}: " not in str(caught.value)
    ]
    assert len(named) > 10


def test_all_mistakes_are_named_at_once():
    """Each start of a server that shows one of them costs a minute."""
    extra = {"engin": "nixl", "port": 70000, "path": "auto", "warm_peers": ["h"], "lease_max_s": 1}
    extra |= {"offload": {"disk_byte": 1, "shares": [0.9, 0.9]}, "sources": ["h:x"]}
    given = {"kv_role": "kv_reader", "rank": 3, "kv_connector_extra_config": extra}
    with pytest.raises(ConfigError) as caught:
        parse_kv_transfer_config(given)
    named = str(caught.value).splitlines()
    assert named[0] == "there are 11 mistakes:"
    fields = (".kv_role is", "key 'rank'", "key 'engin'", ".port is", ".path is", "warm_peers names")
    fields += (".lease_max_s is", "key 'disk_byte'", ".cpu_bytes is missing", ".shares is", ".sources names")
    assert [sum(field in line for line in named) for field in fields] == [1] * 11


def test_a_setting_that_cannot_be_read_makes_no_mistake_of_another():
    """Neither of a role that is wrong, nor of an engine's, nor of a time that another is compared with."""
    extra = {"sources": ["h:1"], "lease_s": "long", "offload": {"cpu_bytes": 0}}
    given = {"kv_role": "kv_reader", "kv_connector_extra_config": extra}
    with pytest.raises(ConfigError, match=r"^there are 3 mistakes:\n.*kv_role.*\n.*lease_s.*\n.*cpu_bytes"):
        parse_kv_transfer_config(given)


@pytest.mark.parametrize(
    ("text", "match"), [("{", "not JSON"), ("[]", "a JSON object"), ("7", "JSON object")]
)
def test_text_that_is_no_object(text, match):
    with pytest.raises(ConfigError, match=match):
        parse_kv_transfer_config(text)


GIB = 1 << 30
OFFLOAD = {
    "cpu_bytes": 8 * GIB,
    "shares": [0.75, 0.25],
    "decoded": False,
    "wait_s": 1,
    "disk_path": "/var/cache/kv",
    "disk_bytes": 64 * GIB,
    "store": "10.0.0.1:50051",
    "store_protocol": "rdma",
    "store_bytes": GIB,
    "peer_share": 0.125,
}


def with_offload(offload, **extra):
    return {"kv_role": "kv_both", "kv_connector_extra_config": {**extra, "offload": offload}}


def test_a_key_of_offload_is_read_whatever_its_type():
    offload = parse_kv_transfer_config(json.dumps(with_offload(OFFLOAD))).extra.offload
    assert offload is not None
    for name, value in OFFLOAD.items():
        assert getattr(offload, name) == (tuple(value) if name == "shares" else value), name


@pytest.mark.parametrize("changes", [{}, {"kv_role": "kv_producer"}])
def test_a_node_that_peers_may_ask_for_what_is_on_its_disk_lends_rows(changes):
    offload = {"cpu_bytes": GIB, "disk_path": "/var/cache/kv", "disk_bytes": GIB}
    given = {**with_offload(offload), **changes}
    assert parse_kv_transfer_config(given).extra.offload.peer_share == 1 / 16
    none = parse_kv_transfer_config({**with_offload({**offload, "peer_share": 0}), **changes})
    assert none.extra.offload.peer_share == 0


@pytest.mark.parametrize(("changes", "extra"), [({"kv_role": "kv_consumer"}, {}), ({}, {"engine": "none"})])
def test_no_rows_are_lent_by_a_node_that_sends_none(changes, extra):
    offload = {"cpu_bytes": GIB, "disk_path": "/var/cache/kv", "disk_bytes": GIB}
    assert (
        parse_kv_transfer_config({**with_offload(offload, **extra), **changes}).extra.offload.peer_share
        is None
    )


def test_offload_needs_no_more_than_its_size():
    assert parse_kv_transfer_config(with_offload({"cpu_bytes": GIB})).extra.offload == OffloadConfig(
        cpu_bytes=GIB
    )
    assert parse_kv_transfer_config(with_offload(None)).extra.offload is None


def test_a_node_may_only_offload():
    config = parse_kv_transfer_config(with_offload({"cpu_bytes": GIB}, engine="none"))
    assert config.extra.engine == "none"


@pytest.mark.parametrize("extra", [{"engine": "none"}, {"engine": "none", "offload": None}])
def test_a_node_that_does_nothing_is_refused(extra):
    with pytest.raises(ConfigError, match=r"engine is 'none' and there is no offload.*mooncake.*cpu_bytes"):
        parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": extra})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"cpu_byte": 1}, r"no key 'cpu_byte' \(its value is 1\).*did you mean 'cpu_bytes'\?.*disk_path"),
        ({"shares": [0.5, 0]}, r"shares is \[0.5, 0\]: Expected `float` > 0"),
        ({"shares": [0.5, 0.6]}, r"shares is \[0.5, 0.6\], which adds up to 1.1"),
        ({"shares": [2.0]}, r"shares is \[2.0\]: Expected `float` <= 1"),
        ({"disk_path": ""}, r"disk_bytes is \d+ and there is no disk_path; accepted: both, or neither"),
        ({"disk_bytes": (1 << 20) - 1}, r"disk_bytes is 1048575, .* at least 1048576"),
        ({"store": "master"}, r"store is 'master', accepted: host:port, and '' for no store"),
        ({"store": "master:0"}, r"store is 'master:0', accepted: host:port"),
        ({"store": ""}, r"store_bytes is 1073741824 and there is no store; accepted: both, or neither"),
        ({"store_metadata": ""}, r"store_metadata is empty; accepted: P2PHANDSHAKE"),
        ({"store_protocol": "udp"}, r"store_protocol is 'udp': accepted: rdma, tcp"),
    ],
)
def test_what_is_wrong_with_offload_is_named(change, match):
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.offload.*" + match):
        parse_kv_transfer_config(with_offload({**OFFLOAD, **change}))


def test_an_address_is_split_where_it_is_one():
    for address in (("host", 1), ("10.0.0.1", 65535), ("::1", 80)):
        assert split_address("{}:{}".format(*address)) == address
    assert split_address("[::1]:80") == ("::1", 80)
    for text in (
        "",
        "host",
        "host:",
        ":80",
        "[]:80",
        "host:0",
        "host:-1",
        "host:65536",
        "host:" + "9" * 5000,
    ):
        assert split_address(text) is None
    assert split_address("host:port") is split_address("host:80 ") is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.dictionaries(st.sampled_from([*TransferConfig.__struct_fields__, "kv_rank"]), json_values, max_size=4),
    st.dictionaries(st.sampled_from([*ExtraConfig.__struct_fields__, "porrt"]), json_values, max_size=4),
    st.none()
    | st.dictionaries(
        st.sampled_from([*OffloadConfig.__struct_fields__, "cpu"]), json_values, max_size=4
    ).map(lambda given: {"cpu_bytes": 1, **given}),
)
def test_nothing_but_a_config_error_comes_out(top, extra, offload):
    if offload is not None:
        extra = {**extra, "offload": offload}
    try:
        parsed = parse_kv_transfer_config({"kv_role": "kv_both", **top, "kv_connector_extra_config": extra})
    except ConfigError:
        return
    assert isinstance(parsed, TransferConfig)
