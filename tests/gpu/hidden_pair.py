"""Two processes that each see one GPU only, as two vLLM servers of one host do.

CUDA_VISIBLE_DEVICES=0 python -m tests.gpu.hidden_pair 1
"""

from __future__ import annotations

import os
import sys

import numpy as np

from kvconnect.engine.base import Engine, Verb
from kvconnect.testing.engine_buffers import OnGpu
from kvconnect.testing.engine_peer import PeerProcess
from kvconnect.testing.engine_suite import Driver

PEER_SEES = "KVCONNECT_TEST_PEER_SEES"


def make_engine() -> Engine:
    from kvconnect.engine.nvlink import NvlinkEngine

    return NvlinkEngine()


def make_hidden_engine() -> Engine:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[PEER_SEES]
    return make_engine()


def main() -> None:
    os.environ[PEER_SEES] = sys.argv[1]
    allocate = OnGpu("cuda:0")
    peer = PeerProcess(make_hidden_engine, allocate)
    driver = Driver(make_engine(), allocate=allocate)
    remote = peer.allocate("buffer", 1 << 20, seed=9)
    peer.register([("buffer", 0, 1 << 20)])
    driver.engine.connect("peer", peer.card())
    assert driver.copy("peer", remote, 500_000).ok
    assert np.array_equal(peer.content("buffer")[:500_000], driver.buffer[:500_000])
    assert driver.copy("peer", remote + 500_000, 500_000, 1_000_000, verb=Verb.READ).ok
    assert np.array_equal(driver.buffer[1_000_000:1_500_000], peer.content("buffer")[500_000:1_000_000])
    driver.engine.close()
    peer.close()
    print("ok")


if __name__ == "__main__":
    main()
