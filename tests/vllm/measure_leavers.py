"""Clients that leave while others are served: ``python -m tests.vllm.measure_leavers --help``.

A pair of vLLM servers answers so many requests at a time over and over, first all of them, then with every
fourth client leaving at a random moment of its decode leg. The prompts are cached on the prefill server, so
that transfers are the bottleneck. What the others got is compared: their tokens with those of a pair over
vLLM's own NixlConnector, their first tokens with the run in which all clients stayed. One JSON object a pair,
on standard output and in a file; nothing here asserts.

    python -m tests.vllm.measure_leavers --engines nixl,mooncake:nvlink --json FILE
    python -m tests.vllm.measure_leavers --cpu --requests 40 --in-flight 4

Batches differ from run to run, and with them, now and then, the last bits of a sum: the reference is asked
for every prompt alone and under the same load, and all that it ever answered counts as right.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvconnect.node.children import BadAnswer, read_metrics
from tests.vllm.load_figures import in_ms
from tests.vllm.pairs import (
    NIXL,
    Pair,
    Variant,
    ask,
    both_served,
    command_line,
    computed_tokens,
    named_variant,
    prepared,
)
from tests.vllm.servers import Server, random_prompt, running
from tests.vllm.tiny_models import Recipe

_BUSY = (
    "leases_held",
    "loads_in_flight",
    "loads_waiting",
    "slots_landing",
    "slots_send",
    "slots_quarantined",
)
"""Gauges of both servers that are zero when nothing is under way."""
_SHOWN_ERRORS = 5
_ERROR_CHARACTERS = 400


@dataclass(frozen=True)
class Outcome:
    """One request: of a client that stayed, or of one that left."""

    prompt: int
    left: bool
    error: str = ""
    first_token_s: float = 0.0
    tokens: tuple[int, ...] = ()


Answers = Mapping[int, set[tuple[int, ...]]]
"""Every answer that the reference gave, by prompt."""


class Load:
    """A closed loop of clients at one pair."""

    def __init__(self, pair: Pair, prompts: Sequence[list[int]], given: argparse.Namespace) -> None:
        self._pair = pair
        self._prompts = prompts
        self._given = given

    def one(self, number: int, leaves_after_s: float | None = None) -> Outcome:
        index = number % len(self._prompts)
        prompt, left = self._prompts[index], leaves_after_s is not None
        try:
            params = self._pair.prefill.prefilled(prompt)
            if leaves_after_s is not None:
                self._pair.decode.abandon(prompt, leaves_after_s, kv_transfer_params=params)
                return Outcome(index, left)
            answer = ask(self._pair.decode.url, prompt, self._given.output_tokens, kv_transfer_params=params)
        except (BadAnswer, OSError) as error:
            return Outcome(index, left, error=f"{error!r}"[:_ERROR_CHARACTERS])
        return Outcome(index, left, "", answer.first_token_s, tuple(answer.tokens))

    def run(self, requests: int, leave_within_s: float = 0.0) -> tuple[list[Outcome], float]:
        """So many requests, and the seconds that they took. After ``limit_s`` none is begun any more."""
        rng = random.Random(self._given.seed)
        # Not every fourth number: clients and prompts would fall into step with it.
        leavers = rng.sample(range(requests), requests // self._given.leave_every) if leave_within_s else []
        leave_after_s = {number: rng.uniform(0, leave_within_s) for number in leavers}
        began = time.monotonic()

        def client(number: int) -> Outcome | None:
            if time.monotonic() - began >= self._given.limit_s:
                return None
            return self.one(number, leave_after_s.get(number))

        # Each thread is a client, which takes the next number once it has its answer.
        with ThreadPoolExecutor(self._given.in_flight) as pool:
            outcomes = [one for one in pool.map(client, range(requests)) if one is not None]
        return outcomes, time.monotonic() - began

    def alone(self) -> list[Outcome]:
        """Every prompt by itself: the prefill server has it from then on."""
        return [self.one(index) for index in range(len(self._prompts))]


def _failures(server: Server) -> Counter[str]:
    found: Counter[str] = Counter()
    for (name, labels), count in read_metrics(server.url).items():
        if name == "vllm:kvconnect_failures_total":
            found[dict(labels)["reason"]] += int(count)
    return found


def until_idle(pair: Pair, within_s: float) -> dict[str, Any]:
    """Seconds until each server's gauges are zero, and those that were not in time.

    An idle server reports nothing: a request of a few tokens makes it take a step.
    """
    began, busy = time.monotonic(), {}
    while True:
        busy = {}
        for server in (pair.prefill, pair.decode):
            server.tokens([1, 2, 3], max_tokens=1)
            numbers = server.metrics()
            busy |= {
                f"{server.name}: {name}": numbers[f"vllm:kvconnect_{name}"]
                for name in _BUSY
                if numbers.get(f"vllm:kvconnect_{name}")
            }
            if used := server.used_blocks():
                busy[f"{server.name}: used blocks"] = used
        took_s = time.monotonic() - began
        if not busy or took_s > within_s:
            return {"idle_after_s": None if busy else round(took_s, 3), "not_idle": busy}
        time.sleep(0.02)


def measured(pair: Pair, load: Load, answers: Answers, given: argparse.Namespace) -> dict[str, Any]:
    """The run without leavers, the one with them, and what became of the others."""

    def wrong(some: Sequence[Outcome], tokens: int | None = None) -> list[Outcome]:
        """Those with other first ``tokens``, or other answers, than the reference ever gave."""
        right = {prompt: {answer[:tokens] for answer in every} for prompt, every in answers.items()}
        return [one for one in some if one.tokens[:tokens] not in right.get(one.prompt, ())]

    warm = load.alone()
    stayed, stayed_s = load.run(given.requests)
    served = [outcome for outcome in stayed if not outcome.error]
    if not served:
        return {"connector": pair.name, "errors": _errors([*warm, *stayed])}
    within_s = statistics.median(outcome.first_token_s for outcome in served)
    until_idle(pair, given.idle_within_s)
    computed, failures = computed_tokens(pair.decode), _failures(pair.decode)
    outcomes, took_s = load.run(given.requests, within_s)
    recomputed = (computed_tokens(pair.decode) - computed) // given.prompt_tokens
    idle = until_idle(pair, given.idle_within_s)
    others = [outcome for outcome in outcomes if not outcome.left]
    good = [outcome for outcome in others if not outcome.error]
    without, beside = ([outcome.first_token_s for outcome in some] for some in (served, good))
    return {
        "connector": pair.name,
        "requests": len(outcomes),
        "left": sum(outcome.left for outcome in outcomes),
        "left_within_ms": round(within_s * 1e3, 1),
        "others": len(others),
        "others_failed": len(others) - len(good),
        "others_recomputed": int(recomputed),
        "others_wrong": len(wrong(good)),
        # It depends on the KV that came over, and on no batch of a decode. Of one or two prompts, also
        # without leavers: a tie that the reference was asked about too seldom. Of many prompts: wrong KV.
        "others_wrong_first_token": len(wrong(good, 1)),
        "others_wrong_first_by_prompt": Counter(one.prompt for one in wrong(good, 1)),
        "stayed_wrong_first_by_prompt": Counter(one.prompt for one in wrong(served, 1)),
        "stayed_failed": len(stayed) - len(served),
        "stayed_wrong": len(wrong(served)),
        "alone_wrong": len(wrong(warm)),
        "first_token_ms": in_ms(beside),
        "first_token_ms_without_leavers": in_ms(without),
        "requests_per_s": round(len(outcomes) / took_s, 2),
        "requests_per_s_without_leavers": round(len(stayed) / stayed_s, 2),
        **idle,
        "failures_counted_by_decode": _failures(pair.decode) - failures,
        "errors": _errors([*warm, *stayed, *outcomes]),
        "wrong": [asdict(outcome) for outcome in wrong(good)[:_SHOWN_ERRORS]],
    }


def _errors(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.error for outcome in outcomes if outcome.error][:_SHOWN_ERRORS]


def asked_reference(load: Load, requests: int) -> tuple[Answers, dict[str, Any]]:
    """All that the reference answers, alone and under load."""
    answers: dict[int, set[tuple[int, ...]]] = {}
    outcomes = load.alone()
    under_load, took_s = load.run(requests)
    for outcome in [*outcomes, *under_load]:
        if not outcome.error:
            answers.setdefault(outcome.prompt, set()).add(outcome.tokens)
    served = [outcome.first_token_s for outcome in under_load if not outcome.error]
    return answers, {
        "connector": NIXL.name,
        "requests": len(under_load),
        "failed": sum(bool(outcome.error) for outcome in under_load),
        "prompts": len(answers),
        "prompts_with_several_answers": sum(len(every) > 1 for every in answers.values()),
        "first_token_ms_without_leavers": in_ms(served),
        "requests_per_s_without_leavers": round(len(under_load) / took_s, 2),
        "errors": _errors([*outcomes, *under_load]),
    }


def _servers(recipe: Recipe, folder: Path, variant: Variant, given: argparse.Namespace) -> Pair:
    """The two processes, started and not waited for."""
    length, seats = given.prompt_tokens + given.output_tokens + 64, 4 * given.in_flight
    options = ["--max-model-len", str(length), "--max-num-seqs", str(seats)]
    both = (options, [*options, "--no-enable-prefix-caching"])
    return both_served(variant, recipe, folder, given, both, given.gpus.split(","), policy="recompute")


def _findings(recipe: Recipe, folder: Path, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prompts = [random_prompt(given.prompt_tokens, seed) for seed in range(given.prompts)]
    reference = _servers(recipe, folder, NIXL, given)
    with running(*reference.servers):
        answers, told = asked_reference(Load(reference, prompts, given), given.reference_requests)
    yield told
    for named in given.engines.split(","):
        made = _servers(recipe, folder, named_variant(named, given.extra), given)
        with running(*made.servers):
            yield measured(made, Load(made, prompts, given), answers, given)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    return command_line(
        __doc__,
        arguments,
        {
            "engines": "engine or engine:protocol, comma separated, one after the other",
            "prompts": "how many differ",
            "prompt_tokens": "a multiple of the chunk and one more",
            "limit_s": "no request of a run begins after that",
        },
        engines="nixl",
        extra={},
        requests=2000,
        reference_requests=400,
        in_flight=16,
        leave_every=4,
        prompts=(8, 24),
        prompt_tokens=(1025, 8193),
        output_tokens=12,
        chunk=(512, 1024),
        kv_gib=(1, 48),
        gpus="0,1",
        limit_s=240.0,
        idle_within_s=60.0,
        seed=1,
    )


def main() -> None:
    given = parsed()
    with prepared(given, tiny="gqa") as (recipe, logs, lines):
        for finding in _findings(recipe, logs, given):
            lines.write("leavers", **finding)


if __name__ == "__main__":
    main()
