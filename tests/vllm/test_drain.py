"""A prefill server that is told to end while a decode server has yet to fetch from it."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.node.children import BadAnswer
from tests.vllm.servers import pair, random_prompt
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(600), pytest.mark.full, pytest.mark.servers]
LEASE_S = 45


def told_to_end(tmp_path, *options):
    """Hold a prompt on P, tell P to end, ask D for it a moment later: its answer, and P's end in seconds."""
    with pair(write_model("gqa", tmp_path), tmp_path, "nixl", prefill_options=options, lease_s=LEASE_S) as (
        prefill,
        decode,
    ):
        prompt, never = random_prompt(700, 1), random_prompt(500, 2)
        expected = prefill.local_tokens(prompt)
        # Met before: what is looked at is the end.
        decode.tokens(never, kv_transfer_params=prefill.prefilled(never))
        params = prefill.prefilled(prompt)
        began = time.monotonic()
        os.kill(prefill.process.pid, signal.SIGTERM)
        time.sleep(3)
        try:
            got = decode.tokens(prompt, kv_transfer_params=params)
        except BadAnswer:
            got = None
        prefill.process.wait(LEASE_S + 30)
        return got, expected, time.monotonic() - began


def test_with_a_shutdown_timeout_what_is_held_is_served_first(tmp_path):
    got, expected, took_s = told_to_end(tmp_path, "--shutdown-timeout", str(LEASE_S + 15))
    assert got == expected
    assert took_s < LEASE_S, "it ends once all was fetched"


def test_without_one_vllm_ends_at_once(tmp_path):
    got, _, took_s = told_to_end(tmp_path)
    assert got is None
    assert took_s < LEASE_S
