"""What stands before the servers: kvconnect's router in both flows, and what else operators look at."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.node.children import COMMAND, BadAnswer, fetch
from kvconnect.tools.timelines import PHASES
from tests.vllm.comparing import assert_bytes_landed
from tests.vllm.servers import EXACT, Server, pair, random_prompt, routed, router
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routed")
    with pair(write_model("gqa", folder), folder, "mooncake", options=EXACT, load_timeout_s=20) as both:
        yield both


def _announced(prefill: Server, decode: Server) -> tuple[dict[str, object], dict[str, object]]:
    """What a router tells both servers at once. Where P listens is taken from an answer, which is used up."""
    prompt = random_prompt(10, 70)
    params = prefill.prefilled(prompt)
    decode.tokens(prompt, kv_transfer_params=params)
    where = {key: params[key] for key in ("remote_host", "remote_port", "remote_engine_id")}
    transfer = {"transfer_id": str(uuid.uuid4())}
    return (
        {"do_remote_decode": True, "do_remote_prefill": False, **transfer},
        {"do_remote_prefill": True, "do_remote_decode": False, **where, **transfer},
    )


@pytest.fixture(scope="module", params=["sequential", "parallel"])
def routing(request, servers):
    """A router's URL and its flow."""
    prefill, decode = servers
    with router("--flow", request.param, "--prefill", prefill.url, "--decode", decode.url) as url:
        yield url, request.param


def test_through_the_router(servers, routing):
    prefill, decode = servers
    url, flow = routing
    # Other prompts for each flow: what the decode server has already is not loaded again.
    # Below 1024 tokens: longer ones round by how they are cut, and several at a time are cut otherwise.
    prompts = [random_prompt(37 + 130 * number, len(flow) + 100 * number) for number in range(8)]
    before = decode.loaded_tokens()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(routed, [url] * len(prompts), prompts))
    assert answers == [[prefill.local_tokens(prompt)] for prompt in prompts]
    assert decode.loaded_tokens() - before == sum(map(len, prompts))
    assert_bytes_landed(prefill, decode, 8)
    prefill.wait_idle()
    decode.wait_idle()


def test_decode_is_asked_before_prefill(servers):
    """The parallel flow at its most parallel: the decode server waits for a prompt nobody has sent yet."""
    prefill, decode = servers
    for_prefill, for_decode = _announced(prefill, decode)
    prompt = random_prompt(1000, 71)
    with ThreadPoolExecutor(2) as pool:
        decoding = pool.submit(decode.tokens, prompt, kv_transfer_params=for_decode)
        time.sleep(0.3)
        prefilling = pool.submit(prefill.ask, prompt, max_tokens=1, kv_transfer_params=for_prefill)
        got = decoding.result(120)
        prefilling.result(120)
    assert got == prefill.local_tokens(prompt)
    assert_bytes_landed(prefill, decode, 1)


def test_a_prefill_that_was_aborted_fails_the_waiting_decode_at_once(servers):
    prefill, decode = servers
    for_prefill, for_decode = _announced(prefill, decode)
    prompt = random_prompt(3900, 73)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(prefill.abandon, prompt, 0.3, max_tokens=1, kv_transfer_params=for_prefill)
        started = time.monotonic()
        with pytest.raises(BadAnswer, match="answered 500"):
            decode.ask(prompt, kv_transfer_params=for_decode)
        leaving.result()
    assert time.monotonic() - started < 15, "well before the load's deadline of 20 s"


SOON_S = 10.0
"""Far less than a lease: blocks that are not fetched would be in use for 30 s."""


FOUR = {"n": 4, "temperature": 1, "top_k": 1}
"""Four answers, which are sampled and yet known: vLLM gives one only where the temperature is 0."""


def _texts(server: Server, prompt: object, **more: object) -> list[list[int]]:
    choices = server.ask(prompt, **more)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def test_several_answers_to_one_prompt_take_one_lease_and_one_load(servers):
    """As routers pass ``n`` on that leave the prefill leg as it is."""
    prefill, decode = servers
    prompt = random_prompt(700, 75)
    holds, loaded = len(prefill.observed("hold")), decode.loaded_tokens()
    params = prefill.prefilled(prompt, **FOUR)
    assert _texts(decode, prompt, **FOUR, kv_transfer_params=params) == [prefill.local_tokens(prompt)] * 4
    prefill.wait_idle(SOON_S)
    decode.wait_idle()
    assert decode.loaded_tokens() - loaded == 700
    assert len(prefill.observed("hold")) - holds == 1


def test_a_batch_of_prompts_comes_over_whole_though_its_answer_tells_of_the_first(servers):
    """As routers pass on that know no batches. One of the prompts is there twice."""
    prefill, decode = servers
    prompts = [random_prompt(400, 80 + number) for number in range(3)]
    prompts.append(prompts[1])
    holds, loaded = len(prefill.observed("hold")), decode.loaded_tokens()
    params = prefill.prefilled(prompts)
    expected = [prefill.local_tokens(prompt) for prompt in prompts]
    assert _texts(decode, prompts, kv_transfer_params=params) == expected
    prefill.wait_idle(SOON_S)
    decode.wait_idle()
    assert decode.loaded_tokens() - loaded == 3 * 400
    assert len(prefill.observed("hold")) - holds == 3


def test_batches_and_several_answers_through_the_router(servers, routing):
    prefill, decode = servers
    url, flow = routing
    loaded = decode.loaded_tokens()
    for number in range(2):
        # Of one length, of different ones, and one of them twice.
        # Of a seed each: one that begins like another would find it on the decode server.
        first = 7000 + 100 * number + 10 * len(flow)
        prompts = [random_prompt(length, first + at) for at, length in enumerate((400, 400, 150, 700))]
        expected = [prefill.local_tokens(prompt) for prompt in prompts]
        assert routed(url, [*prompts[:3], prompts[0]]) == [*expected[:3], expected[0]]
        assert routed(url, prompts[3], **FOUR) == [expected[3]] * 4
    prefill.wait_idle(SOON_S)
    decode.wait_idle()
    assert decode.loaded_tokens() - loaded == 2 * (400 + 400 + 150 + 700)


def test_an_operator_sees_by_their_urls_what_became_of_a_request(servers, tmp_path):
    prefill, decode = servers
    prompt = random_prompt(700, 90)
    decode.from_prefill(prefill, prompt)
    prefill.wait_idle()
    # What became of a hold is known with the next step.
    prefill.tokens([1, 2, 3])
    out = tmp_path / "trace.json"
    command = [*COMMAND, "inspect", prefill.url, decode.url, "--trace", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["load", *PHASES, "late", "request"]
    names = {event["name"] for event in json.loads(out.read_text())["traceEvents"] if event["ph"] in "Xe"}
    halves = {"to queued", "to prefill launched", "to prefill done", "to load ordered", "to loaded"}
    workers = {"to held", "to fetch begun", "write", "unpack", "to reported", "to blocks freed"}
    assert halves | workers <= names


def _series(server: Server) -> dict[str, float]:
    return {name: value for name, value in server.metrics().items() if name.startswith("vllm:kvconnect")}


def test_metrics_of_both_servers(servers):
    prefill, decode = servers
    before = _series(prefill), _series(decode)
    prompt = random_prompt(600, 74)
    decode.from_prefill(prefill, prompt)
    # Told with a step: one more, so that what happened at the end of the last one is told too.
    for server in servers:
        server.tokens([1, 2, 3])
        server.tokens([1, 2, 3])
    after = _series(prefill), _series(decode)
    text = fetch(decode.url + "/metrics").decode()
    # 4 layers x 5 blocks of 128 tokens x 4 heads x (64 + 64) values of 4 bytes.
    moved = 4 * 5 * 128 * 4 * 128 * 4
    for was, now in zip(before, after, strict=True):
        name = "vllm:kvconnect_transfer_bytes_total"
        assert now[name] - was.get(name, 0.0) == moved
        assert now["vllm:kvconnect_transfer_seconds_total"] > was.get(
            "vllm:kvconnect_transfer_seconds_total", 0
        )
        assert now["vllm:kvconnect_copies_total"] > was.get("vllm:kvconnect_copies_total", 0)
        assert now["vllm:kvconnect_leases_held"] == 0
        assert now["vllm:kvconnect_loads_in_flight"] == 0
        assert now["vllm:kvconnect_loads_waiting"] == 0
    assert 'direction="received",' in text
    assert 'lane="tcp"' in text
    assert after[1]["vllm:kvconnect_load_seconds_count"] > 0
    with pytest.raises(BadAnswer):
        decode.ask(prompt[::-1], kv_transfer_params={"do_remote_prefill": True})
    decode.tokens([1, 2, 3])
    assert "vllm:kvconnect_failures_total" in _series(decode)
