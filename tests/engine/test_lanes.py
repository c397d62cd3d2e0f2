"""What carries bytes: read from an engine's words, and from what the system counted meanwhile."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace

import pytest

from kvconnect.engine.lanes import (
    Fabric,
    RdmaPort,
    Seen,
    Traffic,
    Transport,
    expected_rate,
    look_at_traffic,
    seen_lane,
)

NEAR, FAR = "127.0.0.1", "192.0.2.9"
SIDE_CHANNEL = {("10.0.0.1", "10.0.0.2"): 500}
FABRIC = Fabric(rdma=(RdmaPort("mlx5_1", 1, "ACTIVE", "400 Gb/sec (4X NDR)", ""),))
QUIET = Traffic(SIDE_CHANNEL, {"mlx5_0:1": 7, "mlx5_1:1": 0})
SEEN = Seen(1000, 1e9, NEAR, True, False, QUIET, QUIET)


def after(tcp=(), rdma=()):
    return Traffic({**SIDE_CHANNEL, **dict(tcp)}, {**QUIET.rdma, **dict(rdma)})


def ports(second, first=0, **changes):
    """So much went out of the two RDMA ports meanwhile."""
    return {"after": after((), {"mlx5_0:1": 7 + first, "mlx5_1:1": second}), **changes}


def busy(second, **changes):
    """So much went out of an RDMA port, and chunks went to another peer over TCP."""
    return {"after": after({("10.0.0.1", FAR): 4000}, {"mlx5_1:1": second}), "host": "192.0.2.1", **changes}


def tcp(remote, count, **changes):
    return {"after": after({("10.0.0.1" if remote == FAR else NEAR, remote): count}), **changes}


NONE = Traffic()


@pytest.mark.parametrize(
    ("reported", "changes", "kind", "device", "known_by"),
    [
        ("", tcp(NEAR, 1000), "tcp", "lo", "observed"),
        ("nvlink", tcp(NEAR, 950), "tcp", "lo", "observed"),
        ("", tcp(FAR, 1000), "tcp", "", "deduced"),
        ("nvlink", tcp(FAR, 1000), "nvlink", "", ""),
        ("", tcp(NEAR, 500), "shared_memory", "", "deduced"),
        ("", ports(990), "rdma", "mlx5_1:1", "deduced"),
        ("", ports(500, 500), "rdma", "mlx5_0:1,mlx5_1:1", "deduced"),
        ("", ports(500), "shared_memory", "", "deduced"),
        ("", {"on_gpu": True}, "cuda_ipc", "", "deduced"),
        ("", {"on_gpu": True, "bytes_per_s": 280e9}, "nvlink", "", "deduced"),
        ("", {"is_near": False}, "unknown", "", ""),
        ("", {"before": NONE, "after": NONE}, "unknown", "", ""),
        ("", {"total_bytes": 0, "is_near": False}, "unknown", "", ""),
        ("", {"total_bytes": 0}, "unknown", "", ""),
        ("", tcp(NEAR, 1000, before=NONE), "unknown", "", ""),
        ("", busy(990, is_near=False), "rdma", "mlx5_1:1", "deduced"),
        ("", busy(9000, is_near=False), "unknown", "", "rdma or tcp: others"),
        ("", busy(0, is_near=False), "tcp", "", "deduced"),
        ("", busy(0), "unknown", "", "tcp or shared_memory: others"),
        ("", ports(9000, is_near=False), "rdma", "mlx5_1:1", "deduced"),
        ("", ports(9000, on_gpu=True), "unknown", "", "rdma or cuda_ipc:"),
        ("", ports(990, on_gpu=True, bytes_per_s=55e9), "cuda_ipc", "", "deduced"),
        ("", busy(990, on_gpu=True, bytes_per_s=200e9), "nvlink", "", "deduced"),
        ("tcp", {}, "tcp", "", ""),
    ],
)
def test_a_lane_is_what_was_seen_else_what_is_reported_else_deduced_or_unknown(
    reported, changes, kind, device, known_by
):
    found = seen_lane(Transport(reported or "unknown"), replace(SEEN, **changes), FABRIC)
    assert (found.lane, found.device) == (kind, device)
    assert found.known_by.startswith(known_by)
    assert bool(found.known_by) == bool(known_by)


def test_what_a_connection_of_this_process_sent_is_counted():
    listener = socket.create_server((NEAR, 0))
    with socket.create_connection(listener.getsockname()) as sender, listener.accept()[0] as taker:
        before = look_at_traffic()
        reading = threading.Thread(target=lambda: [taker.recv(1 << 20) for _ in range(100)], daemon=True)
        reading.start()
        for _ in range(100):
            sender.sendall(bytes(10_000))
        sender.shutdown(socket.SHUT_WR)
        reading.join(10)
        seen = replace(SEEN, total_bytes=1_000_000, before=before, after=look_at_traffic())
        assert seen_lane(Transport(), seen, FABRIC) == Transport("tcp", "lo", "observed")
    listener.close()


def test_sockets_of_others_stay_as_they_are():
    listener = socket.create_server((NEAR, 0))
    with socket.create_connection(listener.getsockname()) as one, listener.accept()[0] as other:
        other.setblocking(False)
        number = len(os.listdir("/proc/self/fd"))
        socket.setdefaulttimeout(5)
        try:
            assert any(look_at_traffic().tcp.values())
        finally:
            socket.setdefaulttimeout(None)
        assert [os.get_blocking(each.fileno()) for each in (one, other, listener)] == [True, False, True]
        assert len(os.listdir("/proc/self/fd")) == number
    listener.close()


def test_counters_that_cannot_be_read_are_none_at_all(tmp_path, monkeypatch):
    path = tmp_path / "sys/class/infiniband/efa_0/ports/1/hw_counters/tx_bytes"
    path.parent.mkdir(parents=True)
    path.write_text("many\n")
    with socket.create_server((NEAR, 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        one.sendall(b"x")
        assert look_at_traffic(tmp_path) == Traffic()
        assert look_at_traffic().tcp
        monkeypatch.setattr("kvconnect.engine.lanes._MOST_DESCRIPTORS", 3)
        assert not look_at_traffic().tcp
        monkeypatch.setattr("os.listdir", lambda path: 1 / 0)
        assert look_at_traffic() == Traffic()


def test_what_a_port_sent_is_counted_in_words_or_in_bytes(tmp_path):
    for device, name, text in (
        ("mlx5_0", "counters/port_xmit_data", "100"),
        ("efa_0", "hw_counters/tx_bytes", "77"),
        ("odd_0", "counters/port_xmit_data", "?"),
    ):
        path = tmp_path / "sys/class/infiniband" / device / "ports/1" / name
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    assert look_at_traffic(tmp_path).rdma == {"mlx5_0:1": 400, "efa_0:1": 77, "odd_0:1": 0}


def test_the_rate_of_several_ports_is_that_of_all():
    ports = [RdmaPort(f"mlx5_{n}", 1, "ACTIVE", "400 Gb/sec (4X NDR)", "") for n in (0, 1, 10)]
    fabric = Fabric(rdma=tuple(ports))
    assert expected_rate(fabric, Transport("rdma", "mlx5_0:1,mlx5_10:1")) == 100e9
    assert expected_rate(fabric, Transport("rdma", "mlx5_7:1")) == 50e9


def test_the_rate_of_other_lanes_is_that_of_their_hardware_or_unknown():
    fabric = Fabric(nvlinks=18, speeds={"eth0": 25_000})
    rates = [expected_rate(fabric, Transport(kind)) for kind in ("nvlink", "cuda_ipc", "tcp", "rdma")]
    assert rates == [450e9, 450e9, 0, 0]
    assert expected_rate(fabric, Transport("tcp", "eth0")) == 25e9 / 8
