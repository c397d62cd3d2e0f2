"""The interface that an address belongs to, and that NIXL listens there and nowhere else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from kvconnect.addresses import interface_of
from kvconnect.engine import nixl_library
from kvconnect.engine.nixl_library import ucx_options
from kvconnect.engine.registry import available_engines
from kvconnect.errors import ConfigError

LISTENING = """
import os, sys, torch
from kvconnect.engine.base import Span
from kvconnect.engine.registry import create_engine

engine = create_engine("nixl", host=sys.argv[1])
memory = torch.zeros(1 << 16, dtype=torch.uint8)
engine.register([Span(memory.data_ptr(), 1 << 16, "cpu")])
files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
mine = {os.readlink(path) for path in files if os.path.exists(path)}
for line in open("/proc/net/tcp"):
    fields = line.split()
    if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
        print("listens", fields[1].split(":")[0])
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_is_an_interface_of_its_own(host):
    name = interface_of(host)
    assert name in {name for _, name in socket.if_nameindex()}
    assert name.startswith("lo")


@pytest.mark.parametrize("host", ["192.0.2.77", "2001:db8::77", "a.name"])
def test_what_is_no_address_of_this_machine_has_none(host):
    assert interface_of(host) == ""


def test_what_is_configured_is_not_overruled():
    named = {"engine_config": "X=1,NET_DEVICES=eth7"}
    assert ucx_options("127.0.0.1", "", named, {}) == named
    assert ucx_options("127.0.0.1", "", {"a": "b"}, {"UCX_NET_DEVICES": "eth7"}) == {"a": "b"}
    assert ucx_options("10.0.0.1", "mlx5_0:1", {}, {"UCX_NET_DEVICES": "eth7"}) == {
        "engine_config": "NET_DEVICES=mlx5_0:1"
    }
    with pytest.raises(ConfigError, match="takes one device; for several set UCX_NET_DEVICES"):
        ucx_options("10.0.0.1", "a,b", {}, {})


def test_with_an_rdma_card_ucx_chooses_except_on_loopback(monkeypatch, tmp_path, caplog):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(nixl_library, "_RDMA_CARDS", tmp_path)
    monkeypatch.setattr(nixl_library, "interface_of", lambda host: "if0")
    assert ucx_options("10.0.0.1", "", {}, {}) == {}
    assert "listens on all interfaces" in caplog.text
    assert ucx_options("127.0.0.1", "", {}, {}) == {"engine_config": "NET_DEVICES=if0"}
    other = {"engine_config": "TLS=tcp"}
    assert ucx_options("127.0.0.1", "", other, {}) == {"engine_config": "NET_DEVICES=if0,TLS=tcp"}
    monkeypatch.setattr(nixl_library, "_RDMA_CARDS", tmp_path / "none")
    assert ucx_options("10.0.0.1", "", {}, {}) == {"engine_config": "NET_DEVICES=if0"}


@pytest.mark.skipif(bool(available_engines()["nixl"]), reason="NIXL does not work here")
def test_nixl_listens_on_the_interface_of_its_host_alone():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", LISTENING, "127.0.0.1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    listens = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("listens")]
    assert set(listens) == {"0100007F"}, done.stderr
