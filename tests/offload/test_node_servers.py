"""Servers that keep blocks on disk: what is found after a restart is right."""

from __future__ import annotations

import time

from kvconnect.node.children import Children, fetch_json, read_metrics
from kvconnect.node.pair_demo import ask
from tests.node.node_harness import make_prompt
from tests.offload.node_kit import disk_settings, offload_config
from tests.pair_kit import alone

FIRST, SECOND = make_prompt(300, seed=1), make_prompt(200, seed=2)


def serve(children, name, model, folder):
    config = offload_config(cpu_bytes=32 << 20, **disk_settings(folder, disk_bytes=32 << 20))
    options = ("--num-blocks", "64", "--no-enable-prefix-caching", "--num-threads", "1")
    started = alone(children, *options, "--kv-transfer-config", config, name=name, model=model)
    url = started.wait_ready()
    settle(url)
    return started, url


def asked(url, model, prompt):
    """Tokens of an answer, and how many of the prompt's were found."""
    answer = ask(url, model, prompt, max_tokens=8)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def settle(url):
    deadline = time.monotonic() + 30
    while True:
        state = fetch_json(url + "/debug/state")
        if not any(state["offload"]["busy"].values()):
            assert state["blocks"]["held"] == 0
            return state["offload"]["usage"]
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


def test_a_restarted_server_finds_everything_on_disk(tmp_path):
    with Children(tmp_path) as children:
        node, url = serve(children, "first", "hybrid", tmp_path / "kept")
        expected = [asked(url, "hybrid", prompt)[0] for prompt in (FIRST, SECOND)]
        # Nothing is waited for: what was promised to be kept is written before the node ends.
        node.end(20)
        assert node.exit_code() == 0
        node, url = serve(children, "second", "hybrid", tmp_path / "kept")
        for prompt, tokens, kept in zip((FIRST, SECOND), expected, (288, 192), strict=True):
            assert asked(url, "hybrid", prompt) == (tokens, kept)
        usage = settle(url)
        assert fetch_json(url + "/debug/state")["counts"]["cached_tokens"] == 288 + 192
        metrics = {name: value for (name, labels), value in read_metrics(url).items() if not labels}
        held = sum(counts["held"] * usage["row_bytes"][group] for group, counts in usage["host"].items())
        assert metrics["kvconnect_offload_host_bytes"] == held > 0
        assert held < metrics["kvconnect_offload_host_limit_bytes"] <= 32 << 20
        disk = usage["tiers"]["disk"]
        assert metrics["kvconnect_offload_disk_bytes"] == disk["taken_bytes"] > 0
        assert metrics["kvconnect_offload_disk_limit_bytes"] == disk["limit_bytes"]
