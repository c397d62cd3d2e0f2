"""The NVLink engine joined to a network engine, between two real GPUs.

The network engine is a memory engine that is told of GPU memory and would crash if it touched any.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from kvconnect.engine.base import Engine, Verb
from kvconnect.testing.engine_buffers import Buffer, OnGpu, on_host, part
from kvconnect.testing.engine_peer import PeerProcess
from kvconnect.testing.engine_suite import Driver
from tests.engine.test_paired import Double

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there are {GPUS}")]


def make_engine() -> Engine:
    from kvconnect.engine.nvlink import NvlinkEngine
    from kvconnect.engine.paired import PairedEngine

    return PairedEngine(Double("memory", listen=True), NvlinkEngine())


def large_on_gpu(content: np.ndarray) -> Buffer:
    """Large buffers of the peer's go to its GPU, small ones to the host's memory."""
    return OnGpu("cuda:1")(content) if len(content) >= 1 << 20 else on_host(content)


def test_gpu_memory_goes_over_nvlink_and_the_hosts_over_the_network(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvconnect.engine.paired")
    peer = PeerProcess(make_engine, large_on_gpu)
    driver = Driver(make_engine(), allocate=OnGpu("cuda:0"))
    on_gpu, hosts = peer.allocate("gpu", 1 << 20), peer.allocate("host", 1 << 16)
    peer.register([("gpu", 0, 1 << 20), ("host", 0, 1 << 16)])
    driver.engine.connect("peer", peer.card())
    assert "is reached over nvlink" in caplog.text
    assert driver.copy("peer", on_gpu, 1 << 20).ok
    assert np.array_equal(peer.content("gpu"), driver.buffer[: 1 << 20])
    near = on_host(np.arange(1 << 16, dtype=np.uint16).view(np.uint8)[: 1 << 16])
    driver.engine.register([part(near, 0, 1 << 16)])
    assert driver.wait(driver.submit("peer", Verb.WRITE, [near.address], [hosts], [1 << 16])).ok
    assert np.array_equal(peer.content("host"), near.read())
    peer.close()
    driver.engine.close()
