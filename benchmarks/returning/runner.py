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
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import Report
from benchmarks.returning.model import PromptModel
from benchmarks.returning.node import LAYOUT, First, Node
from benchmarks.returning.options import BLOCK_TOKENS, Options
from benchmarks.returning.pages import drop_pages, resident_share

_SEED = 11
_WARM_UPS = 2
# The first ways of a report find nothing.
_COMPUTED_WAYS = 2


@dataclass(frozen=True)
class Way:
    """One way to the first token of the prompts. Seconds are a median with the least and the most.

    ``cached_tokens`` are of one prompt, those that were not computed; ``as_recomputed`` counts the prompts
    whose token was that of the node without tiers.
    """

    way: str
    seconds: float
    least_s: float
    most_s: float
    times_faster: float
    cached_tokens: int
    as_recomputed: int
    prompts: int


@dataclass(frozen=True)
class Found:
    """A run. ``page_cache`` is the part of the disk tier's files that was in memory before it was read."""

    device: str
    model: str
    prompt_tokens: int
    kv_bytes: int
    page_cache: float | None
    ways: tuple[Way, ...]


def bench_returning(options: Options, *, json_output: bool = False) -> int:
    """Time the first token of a prompt that comes back: computed anew, from the GPU, host memory, or disk.

    Returns the exit code: 1 if something was not found where it was kept.

    Raises:
        KVConnectError: a node could not be built, or did not answer in time.
    """
    with ExitStack() as stack:
        disk = options.disk_path
        if disk is None:
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvconnect-bench-")))
        found = _measure(options, disk)
    report = Report("returning", json_output=json_output)
    if json_output:
        report.add(found)
    else:
        run = asdict(found)
        for way in run.pop("ways"):
            report.add({**run, **way})
    report.show()
    expected = (options.used_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return 0 if all(way.cached_tokens == expected for way in found.ways[_COMPUTED_WAYS:]) else 1


def _measure(options: Options, disk: Path) -> Found:
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
    return Found(
        options.device,
        options.used_model,
        options.used_tokens,
        options.used_tokens * options.size.token_bytes,
        None if page_cache is None else round(page_cache, 3),
        tuple(_way(name, firsts, seen["recomputed"]) for name, firsts in seen.items()),
    )


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


def _way(name: str, firsts: Sequence[First], recomputed: Sequence[First]) -> Way:
    seconds = [first.seconds for first in firsts]
    median = statistics.median(seconds)
    return Way(
        way=name,
        seconds=round(median, 5),
        least_s=round(min(seconds), 5),
        most_s=round(max(seconds), 5),
        times_faster=round(statistics.median(first.seconds for first in recomputed) / median, 2),
        cached_tokens=min(first.cached_tokens for first in firsts),
        as_recomputed=sum(a.token == b.token for a, b in zip(firsts, recomputed, strict=True)),
        prompts=len(firsts),
    )
