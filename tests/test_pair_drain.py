"""SIGTERM on a prefill node, in processes of their own: what it holds can be fetched, and then it ends."""

from __future__ import annotations

import json
import time

import pytest

from kvconnect.node.children import BadAnswer, Children
from kvconnect.node.demo import ask

PROMPT = list(range(1, 201))
ASK_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}


def serve(name, role, **extra):
    transfer = {
        "kv_connector": "KVConnect",
        "kv_role": role,
        "engine_id": name,
        "kv_connector_extra_config": {"engine": "nixl", "lease_s": 60, **extra},
    }
    return ["serve", "--model", "gqa", "--port", "0", "--kv-transfer-config", json.dumps(transfer)]


def until_gone(child, seconds):
    deadline = time.monotonic() + seconds
    while child.exit_code() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return child.exit_code()


def test_what_is_held_can_be_fetched_before_the_node_ends(tmp_path):
    with Children(tmp_path) as children:
        prefill = children.start("prefill", *serve("prefill", "kv_producer", drain_s=20))
        decode = children.start("decode", *serve("decode", "kv_consumer"))
        urls = [child.wait_ready() for child in (prefill, decode)]
        expected = ask(urls[0], "gqa", PROMPT)["choices"][0]["token_ids"]
        params = ask(urls[0], "gqa", PROMPT, max_tokens=1, kv_transfer_params=ASK_FOR_KV)[
            "kv_transfer_params"
        ]
        prefill.ask_to_end()
        assert until_gone(prefill, 1.0) is None, "it waits for whom it holds the request for"
        with pytest.raises(BadAnswer):
            ask(urls[0], "gqa", PROMPT, max_tokens=1)
        answer = ask(urls[1], "gqa", [*PROMPT], kv_transfer_params=params)
        assert answer["choices"][0]["token_ids"] == expected
        assert until_gone(prefill, 8.0) == 0, "nothing is held any more"


def test_what_nobody_fetches_keeps_the_node_no_longer_than_it_may(tmp_path):
    with Children(tmp_path) as children:
        prefill = children.start("prefill", *serve("prefill", "kv_producer", drain_s=1))
        url = prefill.wait_ready()
        ask(url, "gqa", PROMPT, max_tokens=1, kv_transfer_params=ASK_FOR_KV)
        prefill.ask_to_end()
        assert until_gone(prefill, 8.0) == 0
