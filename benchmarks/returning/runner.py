"""The order of things: every way to the first token of the same prompts, in one run on one model.

A node without tiers computes them. Then one with tiers computes them, is asked again at once, and again when
others have overwritten its pool; after a restart it has nothing but what is on disk.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.page_cache import drop_pages, resident_share
from benchmarks.report import Report
from benchmarks.returning.model import PromptModel
from benchmarks.returning.node import LAYOUT, First, Node
from benchmarks.returning.options import BLOCK_TOKENS, Options

_SEED = 11
_WARM_UPS = 2
# The first ways of a report find nothing.
_COMPUTED_WAYS = 2


def bench_returning(options: Options, report: Report) -> int:
    """Time the first token of a prompt that comes back: computed anew, from the GPU, host memory, or disk.

    ``page_cache`` is the part of the disk tier's files that was in memory before it was read. Returns the
    exit code: 1 if something was not found where it was kept.

    Raises:
        KVConnectError: a node could not be built, or did not answer in time.
    """
    with ExitStack() as stack:
        disk = options.disk_path
        if disk is None:
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvconnect-bench-")))
        page_cache, seen = _measure(options, disk)
    ways = [_way(name, firsts, seen["recomputed"]) for name, firsts in seen.items()]
    run = {
        "device": options.device,
        "model": options.used_model,
        "prompt_tokens": options.used_tokens,
        "kv_bytes": options.used_tokens * options.size.token_bytes,
        "page_cache": None if page_cache is None else round(page_cache, 3),
    }
    if report.json_output:
        report.add({**run, "ways": ways})
    else:
        for way in ways:
            report.add({**run, **way})
    expected = (options.used_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return 0 if all(way["cached_tokens"] == expected for way in ways[_COMPUTED_WAYS:]) else 1


def _measure(options: Options, disk: Path) -> tuple[float | None, dict[str, list[First]]]:
    """How much of the disk tier's files was in memory, and the first tokens by the way to them."""
    model = PromptModel(options.size, LAYOUT, options.device)
    rng = random.Random(_SEED)

    def made(count: int) -> list[list[int]]:
        return [rng.choices(range(options.size.vocab), k=options.used_tokens) for _ in range(count)]

    prompts, others = made(options.prompts), made(_WARM_UPS)
    seen: dict[str, list[First]] = {}
    with Node(options, model, None) as plain:
        _all(plain.first_token, others)
        seen["recomputed"] = _all(plain.first_token, prompts)
    with Node(options, model, disk) as node:
        for prompt in others:
            node.first_token(prompt)
            node.settle()
        seen["computed, and kept"], seen["own prefix cache"] = [], []
        for prompt in prompts:
            seen["computed, and kept"].append(node.first_token(prompt))
            node.settle()
            seen["own prefix cache"].append(node.first_token(prompt))
            node.settle()
        seen["CPU tier"] = _all(node.first_token, prompts, node.settle)
    drop_pages(disk)
    page_cache = resident_share(disk)
    with Node(options, model, disk) as node:
        # Its copies are warmed up by a prompt that was kept too.
        _all(node.first_token, others[:1], node.settle)
        drop_pages(disk)
        seen["disk tier"] = _all(node.first_token, prompts, node.settle)
    return page_cache, seen


def _all(
    ask: Callable[[Sequence[int]], First],
    prompts: Sequence[Sequence[int]],
    settle: Callable[[], None] = lambda: None,
) -> list[First]:
    firsts = []
    for prompt in prompts:
        firsts.append(ask(prompt))
        settle()
    return firsts


def _way(name: str, firsts: Sequence[First], recomputed: Sequence[First]) -> dict[str, Any]:
    """One way to the first token of the prompts. Seconds are a median with the least and the most.

    ``cached_tokens`` are of one prompt, those that were not computed; ``as_recomputed`` counts the prompts
    whose token was that of the node without tiers.
    """
    seconds = [first.seconds for first in firsts]
    median = statistics.median(seconds)
    return {
        "way": name,
        "seconds": round(median, 5),
        "least_s": round(min(seconds), 5),
        "most_s": round(max(seconds), 5),
        "times_faster": round(statistics.median(first.seconds for first in recomputed) / median, 2),
        "cached_tokens": min(first.cached_tokens for first in firsts),
        "as_recomputed": sum(a.token == b.token for a, b in zip(firsts, recomputed, strict=True)),
        "prompts": len(firsts),
    }
