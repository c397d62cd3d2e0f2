"""kvconnect's own nodes behind vllm-router: what it was answered outlives a restart of the prefill node."""

from __future__ import annotations

import time

import pytest

from kvconnect.config import ExtraConfig
from kvconnect.node.children import Children, growth, read_metrics
from tests.pair_kit import alone, assert_at_rest, serve, tokens
from tests.ports import free_port
from tests.routers.vllm_router import find_router, pd_arguments, routed

pytestmark = pytest.mark.timeout(300)


def start(children, role, *options, **extra):
    return serve(children, role, f"kv_{role}", *options, protocol="auto", **extra)


def test_what_a_router_was_answered_outlives_a_restart_of_the_prefill_node(tmp_path):
    find_router()
    bootstrap_port, http_port, port = free_port(), str(free_port()), free_port()
    with Children(tmp_path) as children:
        single = alone(children)
        prefill = start(children, "producer", "--port", http_port, port=port, bootstrap_port=bootstrap_port)
        # Ids of blocks that cannot be the same on both sides.
        decode = start(children, "consumer", "--reserved-blocks", "61")
        _, *pair = [node.wait_ready() for node in (single, prefill, decode)]
        with routed(tmp_path, *pd_arguments("mooncake", *pair, bootstrap_port)) as url:
            for number in (1, 2):
                prompt = [number, *range(150)]
                assert tokens(url, prompt) == tokens(single.url, prompt)
                assert_at_rest(*pair, within_s=5)
                loaded = {"direction": "received", "outcome": "ok"}
                assert growth({}, read_metrics(pair[1]), "kvconnect_transfers_total", **loaded) == number
                if number == 1:
                    prefill.end(20)
                    prefill.start()
                    prefill.wait_ready()
                    # For so long a peer that was gone is left alone.
                    time.sleep(ExtraConfig().retry_max_s)
