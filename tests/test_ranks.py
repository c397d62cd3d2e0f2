"""Where each rank of a node is reached and listens: maps by rank, networks, addresses behind others."""

from __future__ import annotations

import ipaddress
import secrets
import socket

import pytest

from kvconnect import addresses
from kvconnect.addresses import address_within, interface_addresses
from kvconnect.config import parse_kv_transfer_config
from kvconnect.engine import nixl_library
from kvconnect.engine.registry import available_engines, create_engine
from kvconnect.errors import ConfigError, EngineError
from kvconnect.halves.rank_traits import RankTraits, SentCache
from kvconnect.halves.worker_half import TransferWorker
from kvconnect.peer.asking import describe
from kvconnect.peer.keyring import SharedKeys
from kvconnect.peer.messages import CacheMeaning
from tests.identities import named
from tests.ports import free_port
from tests.transfer.pair import HEADS, PlainCache

FOUND = [
    (name, ipaddress.ip_address(address))
    for name, address in (
        ("lo", "127.0.0.1"),
        ("lo", "::1"),
        ("eth0", "10.1.0.5"),
        ("eth1", "10.2.0.5"),
        ("eth1", "fd00:2::5"),
    )
]


def extra_of(**given):
    return parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": given}).extra


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(addresses, "interface_addresses", lambda: FOUND)


def test_a_rank_has_what_the_map_gives_it_and_else_what_all_have():
    extra = extra_of(
        host="10.0.0.1",
        device_name="eth9",
        ranks={"0": {"host": "10.0.1.1"}, "4-6,9": {"bind": "0.0.0.0", "device_name": "eth1"}},
    )
    seen = {rank: extra.of_rank(rank) for rank in range(11)}
    assert {rank: own.host for rank, own in seen.items() if own.host != "10.0.0.1"} == {0: "10.0.1.1"}
    assert [rank for rank, own in seen.items() if own.device_name == "eth1"] == [4, 5, 6, 9]
    assert (seen[4].listens_at, seen[3].listens_at) == ("0.0.0.0", "10.0.0.1")
    assert not seen[4].ranks


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        ({"a": {}}, r"ranks has 'a'; accepted: ranks such as '0', '4-7' and '0,8-9'"),
        ({"": {}}, "ranks has ''"),
        ({"3-1": {}}, "ranks has '3-1'"),
        ({"0,": {}}, "ranks has '0,'"),
        ({"-1": {}}, "ranks has '-1'"),
        ({"0-3": {}, "3": {}}, r"\['0-3', '3'\], which both name rank 3"),
        ({"7": {}, "0,4-9": {}}, r"\['7', '0,4-9'\], which both name rank 7"),
        ({"5,5": {}}, "both name rank 5"),
        ({"0": {"hots": "10.0.0.1"}}, r"ranks\['0'\] has no key 'hots'.*did you mean 'host'"),
        ({"0": {"host": 5}}, r"ranks\['0'\].host is 5"),
        ({"0": "10.0.0.1"}, r"ranks\['0'\] is '10.0.0.1', it must be an object"),
        (["10.0.0.1"], r"ranks is \['10.0.0.1'\]"),
        ({"0": {"host": "0.0.0.0"}}, "host is '0.0.0.0', which peers cannot connect to.*and bind"),
    ],
)
def test_a_map_that_names_no_ranks_or_one_twice_is_refused(ranks, error):
    with pytest.raises(ConfigError, match=error):
        extra_of(ranks=ranks)


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("10.1.0.0/16", "10.1.0.5"),
        ("fd00:2::/64", "fd00:2::5"),
        ("127.0.0.0/8", "127.0.0.1"),
        ("10.9.9.9", "10.9.9.9"),
        ("node-a", "node-a"),
    ],
)
def test_a_network_is_the_address_of_this_machine_in_it(machine, host, found):
    assert address_within(host, "host") == found
    assert extra_of(ranks={"1": {"host": host}}).here(1).host == found


@pytest.mark.parametrize(
    ("host", "error"),
    [
        (
            "10.0.0.0/8",
            "has 10.1.0.5, 10.2.0.5; accepted: .*10.1.0.5 of eth0, 10.2.0.5 of eth1, fd00:2::5 of",
        ),
        ("10.3.0.0/16", "has no address; accepted"),
        ("10.1.0.5/16", "has host bits set"),
        ("eth0/24", "does not appear to be"),
    ],
)
def test_a_network_with_no_address_of_this_machine_or_with_several_is_refused(machine, host, error):
    with pytest.raises(ConfigError, match=rf"kv_connector_extra_config.bind is '{host}'.*{error}"):
        extra_of(bind=host).here(0)


def test_the_addresses_of_this_machine_are_found():
    found = {address for _, address in interface_addresses()}
    assert ipaddress.ip_address("127.0.0.1") in found
    for address in found:
        if not address.is_link_local:
            with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as tried:
                tried.bind((str(address), 0))


@pytest.mark.parametrize(
    "given",
    [{"bind": "0.0.0.0"}, {"ranks": {"3": {"host": "10.0.0.1"}}}, {"ranks": {"3": {"bind": "::"}}}],
)
def test_what_another_machine_reaches_is_not_insecure_nor_without_a_key(given, monkeypatch):
    with pytest.raises(ConfigError, match="insecure is true, and host or bind is"):
        extra_of(insecure=True, **given)
    monkeypatch.delenv("KVCONNECT_KEY", raising=False)
    with pytest.raises(ConfigError, match="host or bind is .* and the side channel has no key"):
        serving(**given)
    assert extra_of(insecure=True, host="127.0.0.0/8", bind="127.0.0.3").insecure


def serving(rank=0, **given):
    cache = PlainCache(8)
    sent = SentCache(cache.described, CacheMeaning(named(), HEADS, 2))
    config = parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": given})
    return TransferWorker(config, RankTraits(rank, sent=sent))


@pytest.mark.parametrize(
    ("host", "bind", "reached", "deaf"),
    [
        ("127.0.0.3", "0.0.0.0", ["127.0.0.1", "127.0.0.3"], []),
        ("192.0.2.7", "127.0.0.2", ["127.0.0.2"], ["127.0.0.1"]),
        ("::1", "", ["::1"], ["127.0.0.1"]),
        ("127.0.0.0/8", "", ["127.0.0.1"], ["127.0.0.2"]),
    ],
)
def test_a_worker_listens_at_bind_and_is_announced_at_host(monkeypatch, host, bind, reached, deaf):
    secret, port = secrets.token_urlsafe(32), free_port()
    monkeypatch.setenv("KVCONNECT_KEY", secret)
    own = {"host": host, "bind": bind}
    worker = serving(rank=1, engine="memory", num_slots=2, slot_bytes=1 << 16, port=port, ranks={"1": own})
    try:
        address = worker.address()
        assert (address.rank, address.host, address.port) == (1, host.replace(".0/8", ".1"), port + 1)
        for at in reached:
            told = describe(extra_of(), SharedKeys(secret, ""), (at, port + 1)).value
            assert told.introduction.rank == 1
        for at in deaf:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((at, port + 1), timeout=2)
    finally:
        worker.close()


@pytest.mark.skipif(bool(available_engines()["mooncake"]), reason="Mooncake does not work here")
def test_mooncake_refuses_an_address_that_it_would_not_listen_at(monkeypatch):
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    with pytest.raises(
        EngineError, match="host is '::1', and Mooncake listens for IPv4 alone.*MC_USE_IPV6=1"
    ):
        create_engine("mooncake", host="::1", protocol="tcp")


def test_nixl_refuses_an_address_that_no_interface_has(monkeypatch, tmp_path):
    monkeypatch.setattr(nixl_library, "_RDMA_CARDS", tmp_path / "none")
    with pytest.raises(ConfigError, match="host is '192.0.2.77', which no interface here has.*device_name"):
        nixl_library.ucx_options("192.0.2.77", "", {}, {})
    assert nixl_library.ucx_options("192.0.2.77", "eth1", {}, {}) == {"engine_config": "NET_DEVICES=eth1"}
    assert nixl_library.ucx_options("node-a", "", {}, {}) == {}
