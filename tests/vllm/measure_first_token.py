"""The first token from the prefill server: ``python -m tests.vllm.measure_first_token --help``.

One pair behind two routers, one with ``--first-token prefill``, one with ``decode``. No server has a prompt
when it comes. One request at a time, in turns: the prefill server alone with one token (its leg), then each
router. One JSON object a length, with medians in milliseconds; nothing here asserts.

    python -m tests.vllm.measure_first_token --cpu
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import statistics
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

from tests.vllm.load_client import LETTERS
from tests.vllm.load_figures import streamed
from tests.vllm.pairs import command_line, environment, gpu_options, named_variant, prepared
from tests.vllm.servers import Server, router, running

_FIRST = ("prefill", "decode")


def lettered(url: str, prompt: list[int], max_tokens: int) -> list[tuple[float, int]]:
    """Seconds from asking to each token, and the token, which is a letter."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "allowed_token_ids": LETTERS}
    where = urlsplit(url)
    client = http.client.HTTPConnection(str(where.hostname), where.port, timeout=120)
    found: list[tuple[float, int]] = []
    try:
        began = time.perf_counter()
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in client.getresponse():
            for choice in streamed(line).get("choices") or ():
                found += [(time.perf_counter() - began, ord(letter)) for letter in choice["text"]]
    finally:
        client.close()
    assert len(found) == max_tokens, f"{url} answered with {len(found)} of {max_tokens} tokens"
    return found


def moments(url: str, prompt: list[int], max_tokens: int) -> list[float]:
    """Seconds from asking to each token."""
    return [seconds for seconds, _ in lettered(url, prompt, max_tokens)]


def compared(
    prefill: Server, urls: dict[str, str], length: int, rounds: int, tokens: int
) -> dict[str, float]:
    """Medians in milliseconds over the rounds; the first round does not count."""
    rng, legs, seen = random.Random(length), [], {name: [] for name in urls}
    for turn in range(rounds + 1):
        prompts = [rng.choices(LETTERS, k=length) for _ in range(3)]
        asked = [(legs, lambda p=prompts[0]: moments(prefill.url, p, 1)[0])]
        for (name, url), prompt in zip(urls.items(), prompts[1:], strict=True):
            asked.append((seen[name], lambda u=url, p=prompt: moments(u, p, tokens)))
        for into, ask in asked[turn % 3 :] + asked[: turn % 3]:
            value = ask()
            if turn:
                into.append(value)
    found = {"prefill_leg": statistics.median(legs)}
    for name, answers in seen.items():
        found[f"{name}: first token"] = statistics.median(answer[0] for answer in answers)
        found[f"{name}: to the second"] = statistics.median(answer[1] - answer[0] for answer in answers)
        gaps = [late - early for answer in answers for early, late in itertools.pairwise(answer[1:])]
        found[f"{name}: later gaps"] = statistics.median(gaps)
        found[f"{name}: whole answer"] = statistics.median(answer[-1] for answer in answers)
    return {name: round(seconds * 1e3, 2) for name, seconds in found.items()}


def main() -> None:
    given = command_line(
        __doc__,
        None,
        {"lengths": "of prompts; repeatable", "tokens": "of each answer", "rounds": "that count"},
        lengths=([256, 1024, 3000], [1024, 8192, int]),
        tokens=16,
        rounds=9,
        engine="nixl",
        extra={},
        gpus="0,1",
        kv_gib=(1, 24),
        server_option=[],
    )
    places, variant = given.gpus.split(","), named_variant(given.engine, given.extra)
    with prepared(given, places[0], tiny="gqa") as (recipe, logs, lines), ExitStack() as stack:
        options = ["--max-model-len", str(max(given.lengths) + 128), "--no-enable-prefix-caching"]
        options += [*([] if given.cpu else gpu_options(8192, given.kv_gib)), *given.server_option]
        made = []
        for cpu, (role, place) in enumerate(zip(("producer", "consumer"), places, strict=True)):
            settings = environment(None if given.cpu else place)
            made.append(Server(recipe, logs, role, str(cpu), variant.config(role), options, settings))
        prefill, decode = stack.enter_context(running(*made))
        nodes = ("--prefill", prefill.url, "--decode", decode.url)
        urls = {one: stack.enter_context(router("--first-token", one, *nodes)) for one in _FIRST}
        # The router tries whether the decode server takes a first token.
        time.sleep(5)
        for length in given.lengths:
            found = compared(prefill, urls, length, rounds=given.rounds, tokens=given.tokens)
            lines.write("first token", tokens=length, **found)


if __name__ == "__main__":
    main()
