"""Servers with kvconnect's linker restore what left the device exactly, from host memory and from disk.

A pair comes first, whose decode server fills a folder; a server by itself then has that folder, twice.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed here; make test-sglang")

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from tests.sglang.servers import (
    LINKED,
    PAGE_TOKENS,
    Asked,
    SglangServer,
    pair,
    random_prompt,
    running,
)

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

TOKENS = 4096
SMALL = ("--max-total-tokens", str(TOKENS))
OWN_PREFIX = "--disaggregation-decode-enable-radix-cache"
PROMPTS = [random_prompt(length, 900 + length) for length in (100, 511, 1000, 1024, 1500)]
HANDED_OVER = random_prompt(700, 31)


def offload(folder):
    return {"cpu_bytes": 1 << 28, "disk_path": str(folder), "disk_bytes": 1 << 30}


def fill_device(server, seed):
    """Other prompts take all pages of the device."""
    for number in range(TOKENS // 1500 + 2):
        server.ask(random_prompt(1500, 10_000 * seed + number), max_new_tokens=1)


def restorable(prompt):
    """The last token is computed, and what is not a whole page."""
    return (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS


def moved(server, move, tier, awaited=0.0):
    """Rows that were stored, restored, kept or fetched; metrics come a second late, or later."""
    until = time.monotonic() + 20
    while True:
        time.sleep(1.5)
        found = server.metrics(move=move, tier=tier).get("kvconnect_offload_rows_total", 0.0)
        if found >= awaited or time.monotonic() > until:
            return found


def check(answer, expected, cached):
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["meta_info"]["cached_tokens"] == cached
    ours, theirs = (one["meta_info"]["output_token_logprobs"] for one in (answer, expected))
    assert [one[0] for one in ours] == pytest.approx([one[0] for one in theirs], abs=1e-5)


@pytest.fixture(scope="module")
def folder(model, plain, tmp_path_factory):
    """What the decode server of a pair left on disk, of a prompt that it was handed over."""
    at = tmp_path_factory.mktemp("pair")
    disks = {role: {"offload": offload(at / f"{role} disk")} for role in ("prefill", "decode")}
    options = {"prefill_options": [*LINKED, *SMALL], "decode_options": [*LINKED, *SMALL, OWN_PREFIX]}
    with pair(model, at, "mooncake", **disks, **options) as (prefill, decode):
        assert Asked(prefill, decode, HANDED_OVER, max_new_tokens=40).tokens() == plain(
            HANDED_OVER, max_new_tokens=40
        )
        for seed in range(TOKENS // 1500 + 2):
            Asked(prefill, decode, random_prompt(1500, seed), max_new_tokens=1).tokens()
        again = Asked(prefill, decode, HANDED_OVER, max_new_tokens=40)
        assert again.tokens() == plain(HANDED_OVER, max_new_tokens=40)
        pages = restorable(HANDED_OVER) // PAGE_TOKENS
        assert moved(prefill, "restored", "cpu", pages) == pages
        assert moved(decode, "kept", "disk", pages + 1) > pages
        prefill.wait_idle()
        decode.wait_idle()
    return at / "decode disk"


@pytest.fixture(scope="module")
def server(model, folder, tmp_path_factory):
    at = tmp_path_factory.mktemp("linked")
    made = SglangServer(model, at, "linked", [*LINKED, *SMALL], {"KVCONNECT_CONFIG": alone(folder)})
    with running(made) as (one,):
        yield one


def alone(folder):
    return json.dumps({"offload": offload(folder)})


def test_another_server_has_what_the_decode_server_was_handed_over(plain, server):
    whole = HANDED_OVER + plain(HANDED_OVER, max_new_tokens=40)
    expected = plain.ask(whole, return_logprob=True)
    # The last token of an answer has no KV.
    check(server.ask(whole, return_logprob=True), expected, restorable(whole[:-1]))
    pages = restorable(whole[:-1]) // PAGE_TOKENS
    assert moved(server, "fetched", "disk", pages) == pages


def test_returning_prompts_are_restored_exactly(plain, server):
    expected = [plain.ask(prompt, return_logprob=True) for prompt in PROMPTS]
    for seed, prompt in enumerate(PROMPTS):
        check(server.ask(prompt, return_logprob=True), expected[seed], 0)
    fill_device(server, 1)
    began = moved(server, "restored", "cpu")
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = pool.map(lambda prompt: server.ask(prompt, return_logprob=True), PROMPTS)
        for prompt, answer, wanted in zip(PROMPTS, answers, expected, strict=True):
            check(answer, wanted, restorable(prompt))
    pages = sum(restorable(prompt) for prompt in PROMPTS) // PAGE_TOKENS
    assert moved(server, "restored", "cpu", began + pages) - began == pages
    # A part on the device, a part in host memory, and a part that is new.
    fill_device(server, 2)
    server.ask(PROMPTS[3][:200], max_new_tokens=1)
    longer = PROMPTS[3] + random_prompt(100, 5)
    check(server.ask(longer, return_logprob=True), plain.ask(longer, return_logprob=True), len(PROMPTS[3]))
    server.wait_idle()


def test_other_tenants_find_nothing(plain, server):
    prompt = random_prompt(600, 77)
    expected = plain.ask(prompt, return_logprob=True)
    check(server.ask(prompt, return_logprob=True, cache_salt="one"), expected, 0)
    fill_device(server, 3)
    check(server.ask(prompt, return_logprob=True, cache_salt="other"), expected, 0)
    check(server.ask(prompt, return_logprob=True), expected, 0)
    check(server.ask(prompt, return_logprob=True, cache_salt="one"), expected, restorable(prompt))


def test_after_a_restart_the_disk_has_all_but_what_was_damaged(model, plain, server, folder, tmp_path):
    prompt = PROMPTS[2]
    pages = get_storage_hash_str(RadixKey(prompt), None, page_size=PAGE_TOKENS)
    assert moved(server, "kept", "disk", 1) > 0
    server.kill()
    (path,) = [path for path in folder.rglob("*.kv") if pages[30] in path.name]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    made = SglangServer(model, tmp_path, "again", [*LINKED, *SMALL], {"KVCONNECT_CONFIG": alone(folder)})
    with running(made) as (again,):
        expected = plain.ask(prompt, return_logprob=True)
        check(again.ask(prompt, return_logprob=True), expected, 30 * PAGE_TOKENS)
        expected = plain.ask(PROMPTS[4], return_logprob=True)
        check(again.ask(PROMPTS[4], return_logprob=True), expected, restorable(PROMPTS[4]))
        again.wait_idle()
        assert "disk_corrupt" in again.fetch("/metrics").decode()
