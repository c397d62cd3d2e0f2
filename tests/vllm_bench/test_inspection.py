"""vLLM's worker answers who inspects it: what it holds of vLLM's requests, and what its tiers hold."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.tools.inspect_runner import look
from tests.vllm_bench.model import MODELS
from tests.vllm_bench.pair import Engines, Setup
from tests.vllm_bench.settings import EngineSettings


def test_a_worker_of_vllm_shows_its_leases_peers_and_tiers():
    engines = Engines(Setup("pd", MODELS["windows"], ("LBNHC", "LBNHC"), cpu_bytes=1 << 20))
    try:
        prefill, decode = engines.all
        for engine in engines.all:
            engine.begin(EngineSettings(), random.Random(0))
        prompt = list(range(60))
        prefill.add("a", prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        while "a" not in prefill.ended:
            prefill.step()
        described, found = seen(prefill)
        while not found.leases or found.leases[0].state != "held":
            # What holds it comes with the orders of a later step.
            prefill.step()
            described, found = seen(prefill)
        assert (described.role, found.engine_id) == ("kv_producer", "prefill")
        assert "vllm" in described.versions
        (lease,) = found.leases
        assert lease.request_id.startswith("a")
        # D computes the last token of the prompt itself.
        assert (lease.tokens, lease.blocks > 0) == (len(prompt) - 1, True)
        decode.add("a", prompt, 3, prefill.ended["a"][1])
        while decode.is_busy or prefill.is_busy:
            prefill.step()
            decode.step()
        (described, found), (_, sent) = seen(decode), seen(prefill)
        assert described.role == "kv_consumer"
        assert [(peer.engine_id, peer.direction) for peer in found.peers] == [("prefill", "received")]
        assert (found.leases, found.loads, sent.leases) == ((), (), ())
        host = sent.tiers["host"]
        assert 0 < host["taken_bytes"] <= host["limit_bytes"] <= 1 << 20
    finally:
        engines.close()


def seen(engine):
    transfer = engine.worker._worker.transfer
    address = transfer.address()
    return look(transfer._config.extra, None, (address.host, address.port), whole=True)
