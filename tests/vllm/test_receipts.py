"""Receipts of real vLLM servers, over every path that KV comes by, against vLLM's own counts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.node.children import fetch, fetch_json
from kvconnect.peer.keyring import SharedKeys, new_secret
from kvconnect.receipt import verify
from tests.ports import free_port
from tests.vllm.servers import ASK_FOR_KV, ROOT, Server, random_prompt, router, running, transfer_config
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

POOL = 24
"""Blocks of a server's pool, hardly more than the longest prompt needs."""
ASKED = {"kvconnect_receipt": True}
VLLM_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
LONG = 1024 + 40


class Receiving:
    """A server and what its receipts have stated so far, by vLLM's names of sources."""

    def __init__(self, server: Server, secret: bytes) -> None:
        self.server, self._secret = server, secret
        self._stated = dict.fromkeys(VLLM_SOURCES, 0)
        self._before = self._counted()

    def _counted(self) -> dict[str, float]:
        counted = {}
        for source in VLLM_SOURCES:
            found = self.server.metrics(source=source)
            counted[source] = found["vllm:prompt_tokens_by_source_total"]
        return counted

    def ask(self, prompt: list[int], **more: object) -> tuple[dict, dict]:
        """The answer to a prompt, and its receipt, which was verified and adds up."""
        params = {**ASKED, **more.pop("kv_transfer_params", {})}
        answer = self.server.ask(prompt, kv_transfer_params=params, **more)
        given = answer["kv_transfer_params"]["kvconnect_receipt"]
        receipt = verify(given, self._secret)
        tokens = receipt.tokens
        assert sum(tokens.values()) == receipt.prompt_tokens == len(prompt), given
        assert receipt.delivered
        self._stated["local_compute"] += tokens.get("computed", 0)
        self._stated["local_cache_hit"] += tokens.get("device", 0)
        self._stated["external_kv_transfer"] += sum(tokens.get(one, 0) for one in ("host", "disk", "peer"))
        return answer, given

    def check(self) -> None:
        """vLLM has counted the same, over all requests since the start."""
        now = self._counted()
        grown = {source: now[source] - self._before[source] for source in VLLM_SOURCES}
        assert grown == self._stated, self.server.logs()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("receipts")
    recipe, ports = write_model("gqa", folder), [free_port(), free_port()]
    key = folder / "key"
    key.write_text(new_secret())
    key.chmod(0o600)
    made, environment = [], {"PYTHONHASHSEED": "0", "VLLM_SERVER_DEV_MODE": "1"}
    for number in range(2):
        config = transfer_config(
            "both",
            "mooncake",
            kv_load_failure_policy="recompute",
            key_file=str(key),
            port=ports[number],
            sources=[f"127.0.0.1:{ports[1 - number]}"],
            # Host memory of some 20 blocks on the first, so that its disk is used.
            offload={
                "cpu_bytes": (10 << 20) if number == 0 else (64 << 20),
                "disk_path": str(folder / f"disk{number}"),
                "disk_bytes": 1 << 30,
                "pin_quota": 0.5,
            },
        )
        options = ["--num-gpu-blocks-override", str(POOL), "--max-model-len", "2048"]
        made.append(Server(recipe, folder, f"{number}", f"{number}", config, options, environment))
    secret = SharedKeys(key.read_text().strip(), "").receipt_secret
    with running(*made):
        yield [Receiving(server, secret) for server in made], key, ports


def overwrite(server: Receiving) -> None:
    """Fill the small pool with other prompts' blocks."""
    for _ in range(2):
        server.ask(random_prompt(1900, random.getrandbits(30)), max_tokens=1)


def test_every_path_has_its_origin_and_adds_up_as_vllm_counts(servers):
    (first, second), _, ports = servers
    prompt = random_prompt(LONG, 1)
    _, receipt = second.ask(prompt)
    assert receipt["tokens"] == {"computed": LONG}
    assert not receipt.get("loads")
    # The device's own cache.
    _, receipt = second.ask(prompt)
    assert receipt["tokens"] == {"device": 1024, "computed": 40}
    # Host memory.
    overwrite(second)
    _, receipt = second.ask(prompt)
    assert receipt["tokens"] == {"host": 1024, "computed": 40}
    (load,) = receipt["loads"]
    assert (load["origin"], load["tokens"], load["ended"]) == ("host", 1024, "loaded")
    assert load["bytes"] > 0
    assert load["us"] > 0
    assert load["digest"]
    # The disk of a server whose host memory is small.
    seen = set()
    for number in range(6):
        other = random_prompt(LONG, 50 + number)
        first.ask(other)
        for _ in range(3):
            overwrite(first)
        time.sleep(0.3)
        _, receipt = first.ask(other)
        seen |= set(receipt["tokens"])
        if "disk" in seen:
            break
    assert "disk" in seen, first.server.logs()
    # A peer's lease: all of the prompt.
    answer, receipt = first.ask(random_prompt(900, 7), max_tokens=1, kv_transfer_params=ASK_FOR_KV)
    assert receipt["tokens"] == {"computed": 900}
    handed = answer["kv_transfer_params"]
    _, receipt = second.ask(random_prompt(900, 7), kv_transfer_params=handed)
    assert receipt["tokens"] == {"peer": 900}
    assert receipt["prefill"] == handed["kvconnect_receipt"]
    (load,) = receipt["loads"]
    assert (load["by"], load["tier"], load["address"]) == ("lease", "device", f"127.0.0.1:{ports[0]}")
    assert load["identity"] == receipt["identity"] != ""
    assert load["bytes"] > 0
    assert load["digest"]
    # A handle of another prompt, one that is forged, and one that is spent: computed, with the cause.
    spent = random_prompt(900, 7)
    for params, prompted, cause in (
        (handed, random_prompt(900, 8), "prompt_differs"),
        ({**handed, "kvconnect_handle": "s3.forged"}, random_prompt(900, 9), "parameters_refused"),
        (handed, spent, "fetched_before"),
    ):
        if prompted is spent:
            second.server.fetch("/reset_prefix_cache?reset_external=true", {})
        _, receipt = second.ask(prompted, kv_transfer_params=params)
        assert set(receipt["tokens"]) == {"computed"}, (cause, receipt)
        assert [load["ended"] for load in receipt["loads"]] == [cause]
    # By name: the source's host memory. The first ones may be computed, until the link is measured.
    for number in range(20):
        pulled = random_prompt(LONG, 200 + number)
        second.ask(pulled)
        _, receipt = first.ask(pulled)
        if "peer" in receipt["tokens"]:
            break
    assert receipt["tokens"] == {"peer": 1024, "computed": 40}, first.server.logs()
    (load,) = receipt["loads"]
    assert (load["by"], load["tier"]) == ("name", "host")
    assert load["identity"] == receipt["identity"]
    for server in (first, second):
        server.check()
        server.server.wait_idle()


def test_p_and_d_receipts_are_one_through_the_router_and_inspect_prints_it(servers):
    (first, second), key, ports = servers
    prompt = random_prompt(700, 300)
    with router("--prefill", first.server.url, "--decode", second.server.url) as url:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "kv_transfer_params": ASKED}
        answer = fetch_json(url + "/v1/completions", body, 120)
        given = answer["kv_transfer_params"]["kvconnect_receipt"]
        assert given["tokens"] == {"peer": 700}
        # P's own, signed by P, which D checked to belong to its handle.
        assert given["prefill"]["tokens"] == {"computed": 700}
        assert given["prefill"]["handle"]
        # A stream carries none: the side channel has it.
        body |= {"prompt": random_prompt(700, 301), "stream": True}
        streamed = fetch(url + "/v1/completions", body, 120, {"X-Request-Id": "of-a-stream"})
        assert b"kvconnect_receipt" not in streamed
    found = inspected(f"127.0.0.1:{ports[1]}", "of-a-stream", key)
    (receipt,) = found["holds"]["receipts"]
    assert receipt["tokens"] == {"peer": 700}
    command = [sys.executable, "-m", "kvconnect", "keys", "verify", "-", "--key", str(key)]
    for one in (receipt, answer):
        printed = subprocess.run(
            command, input=json.dumps(one), text=True, capture_output=True, cwd=ROOT, timeout=250, check=True
        )
        assert "700 prompt tokens: 700 peer" in printed.stdout


def notice(*more: dict, of: str = "prompt", **payload: object) -> dict:
    """Parameters of a request that announces its prompt."""
    actions = [{"action_type": "prefetch", "payload": {"of": of, **payload}}, *more]
    listed = [{"action_id": str(at), "action_version": "1", **one} for at, one in enumerate(actions)]
    return {"kv_hints": {"protocol_version": "1", "message_id": "m", "actions": listed}}


def announced(server: Receiving, prompt: list[int], params: dict | None = None, **more: object) -> list[dict]:
    """The results of a notice, which is answered with one token."""
    answer = server.server.ask(prompt, kv_transfer_params=params or notice(), **more)
    assert answer["usage"]["completion_tokens"] == 1
    return answer["kv_transfer_params"]["kv_hint_results"]["actions"]


def test_an_announced_prompt_is_on_the_device_when_its_request_comes(servers):
    (first, second), _, _ = servers
    prompt = random_prompt(LONG, 500)
    second.ask(prompt)
    overwrite(second)
    (done,) = announced(second, prompt)
    assert (done["outcome"], done["tier"], done["num_tokens"]) == ("accepted", "device", 1024), done
    assert second.ask(prompt)[1]["tokens"] == {"device": 1024, "computed": 40}
    # From a peer's host memory; the link is measured by now.
    pulled = random_prompt(LONG, 501)
    second.ask(pulled)
    (done,) = announced(first, pulled)
    assert (done["outcome"], done["num_tokens"]) == ("accepted", 1024), first.server.logs()
    assert first.ask(pulled)[1]["tokens"] == {"device": 1024, "computed": 40}


def test_a_notice_that_finds_nothing_computes_nothing_and_holds_nothing(servers):
    (first, second), _, _ = servers
    prompt = random_prompt(LONG, 510)
    second.ask(prompt, cache_salt="of a tenant")
    before = second.server.metrics(source="local_compute")["vllm:prompt_tokens_by_source_total"]
    for params, more in (
        (None, {}),
        (None, {"cache_salt": "of another"}),
        (notice(names=["00"]), {}),
        (notice(to="disk"), {}),
        (notice({"action_type": "pin", "payload": {"session_id": "s"}}), {}),
    ):
        results = announced(second, prompt, params, **more)
        assert {one["outcome"] for one in results} == {"rejected"}, results
    with ThreadPoolExecutor(16) as clients:
        each = list(clients.map(lambda at: announced(second, random_prompt(LONG, 600 + at)), range(100)))
    assert all(results[0]["outcome"] == "rejected" for results in each)
    after = second.server.metrics(source="local_compute")["vllm:prompt_tokens_by_source_total"]
    assert after - before == 105, "a token each"
    second.server.wait_idle()
    del first


def test_who_asks_for_none_gets_none(servers):
    (first, _), _, _ = servers
    handed = first.server.ask(random_prompt(300, 400), max_tokens=1, kv_transfer_params=ASK_FOR_KV)
    assert "kvconnect_receipt" not in handed["kv_transfer_params"]


def inspected(address: str, request_id: str, key) -> dict:
    command = [sys.executable, "-m", "kvconnect", "inspect", address, "--request", request_id]
    command += ["--json", "--key", str(key)]
    for _ in range(20):
        printed = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), timeout=250, check=True
        )
        found = json.loads(printed.stdout)
        if found["holds"]["receipts"]:
            break
        time.sleep(0.2)
    return found
