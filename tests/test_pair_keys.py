"""Nodes with keys of their own: who may fetch, what is said to who may not, and a peer added meanwhile."""

from __future__ import annotations

import json
import time

import pytest

from kvconnect.node.children import BadAnswer, Children, growth, read_metrics
from kvconnect.node.demo import ask
from tests.peer.keys import introduce, make_folder

EXTRA = {"engine": "nixl", "lease_s": 10, "peer_timeout_s": 4}
ASK_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}


def serve(children, name, role, **extra):
    config = {
        "kv_connector": "KVConnect",
        "kv_role": role,
        "kv_connector_extra_config": {**EXTRA, **extra},
    }
    options = [
        "--model",
        "gqa",
        "--port",
        "0",
        "--num-threads",
        "1",
        "--kv-transfer-config",
        json.dumps(config),
    ]
    return children.start(name, "serve", *options)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """P, a D that it knows, one that it does not, and one that is insecure; and the folders of their keys."""
    folder = tmp_path_factory.mktemp("keys")
    publics = {name: make_folder(folder / name) for name in ("p", "known", "stranger")}
    introduce(folder / "p", "known", publics["known"], "192.0.2.1")
    for name in ("known", "stranger"):
        introduce(folder / name, "p", publics["p"], "127.0.0.0/8")
    with Children(tmp_path_factory.mktemp("pair")) as children:
        started = {
            "p": serve(children, "p", "kv_producer", keys_dir=str(folder / "p")),
            "known": serve(children, "known", "kv_consumer", keys_dir=str(folder / "known")),
            "stranger": serve(children, "stranger", "kv_consumer", keys_dir=str(folder / "stranger")),
            "insecure": serve(children, "insecure", "kv_consumer", insecure=True),
        }
        urls = {name: child.wait_ready() for name, child in started.items()}
        yield {**urls, "folder": folder, "publics": publics}


def prompt(number):
    return [number, *range(1, 201)]


def handed(nodes, number):
    answer = ask(nodes["p"], "gqa", prompt(number), max_tokens=1, kv_transfer_params=ASK_FOR_KV)
    return answer["kv_transfer_params"]


def test_who_is_known_is_served(nodes):
    before = read_metrics(nodes["known"])
    ask(nodes["known"], "gqa", prompt(1), kv_transfer_params=handed(nodes, 1))
    after = read_metrics(nodes["known"])
    assert growth(before, after, "kvconnect_transfer_bytes_total", direction="received") > 0


def test_who_is_not_known_is_told_so_until_it_is_added_while_both_run(nodes):
    before = read_metrics(nodes["p"])
    began = time.monotonic()
    with pytest.raises(BadAnswer, match="does not admit our public key"):
        ask(nodes["stranger"], "gqa", prompt(2), kv_transfer_params=handed(nodes, 2))
    assert time.monotonic() - began < 5
    after = read_metrics(nodes["p"])
    assert growth(before, after, "kvconnect_failures_total", reason="client_not_admitted") > 0
    introduce(nodes["folder"] / "p", "stranger", nodes["publics"]["stranger"], "192.0.2.2")
    deadline = time.monotonic() + 20
    while True:
        try:
            ask(nodes["stranger"], "gqa", prompt(3), kv_transfer_params=handed(nodes, 3))
            return
        except BadAnswer:
            # The peer that failed may be given a pause.
            assert time.monotonic() < deadline
            time.sleep(0.5)


def test_who_has_no_key_is_told_so(nodes):
    with pytest.raises(BadAnswer, match="the prefill node has keys, this one is insecure"):
        ask(nodes["insecure"], "gqa", prompt(4), kv_transfer_params=handed(nodes, 4))
