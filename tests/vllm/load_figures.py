"""Requests under load as figures: when they arrive, what was seen of each, what they come to. No server."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvconnect.node.children import Samples

PARTS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_SHOWN_ERRORS = 5

Buckets = Mapping[float, float]
"""A histogram: upper edges in seconds, ascending, and how many observations are not above each."""


@dataclass(frozen=True)
class Load:
    """Requests of so many tokens in and out; so many a second, None where clients wait for their answers."""

    tokens_in: int
    tokens_out: int
    rate_per_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Load:
        """Read ``in:out:rate`` or ``in:out``. Raises ValueError: it is neither, or not above 0."""
        parts = text.split(":")
        if len(parts) not in (2, 3):
            raise ValueError(f"load {text!r} is not tokens in:tokens out:requests a second")
        load = cls(int(parts[0]), int(parts[1]), *map(float, parts[2:]))
        if min(load.tokens_in, load.tokens_out, load.rate_per_s or 1) <= 0 or load.rate_per_s == 0:
            raise ValueError(f"load {text!r} has a number that is not above 0")
        return load

    def __str__(self) -> str:
        rate = "" if self.rate_per_s is None else f" at {self.rate_per_s:g}/s"
        return f"{self.tokens_in} in, {self.tokens_out} out{rate}"


def arrivals_s(rate_per_s: float, count: int, seed: int) -> list[float]:
    """When the requests of a Poisson process arrive, in seconds from its start."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate_per_s) for _ in range(count)))


def prompts(length: int, count: int, seed: int, tokens: Sequence[int] = range(256)) -> list[str]:
    """Random prompts as JSON lists of token ids: the client's loop has no time to write them."""
    rng = random.Random(seed)
    return [str([tokens[byte % len(tokens)] for byte in rng.randbytes(length)]) for _ in range(count)]


@dataclass(frozen=True)
class Sample:
    """What a client saw of one request: seconds, those of moments since the start of its run.

    ``late_s`` is by how much the client itself began too late; ``prefill_s`` is None behind a router;
    ``decode_s`` is from asking the decode server to its first token, ``first_token_s`` from the arrival to
    the same. ``gaps_s`` lie between pieces of the stream, which are tokens unless the server joins some.
    ``error`` is why there is none of these.
    """

    ended_s: float
    late_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float = 0.0
    first_token_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    error: str = ""
    detail: str = ""


def streamed(line: bytes) -> dict[str, Any]:
    """What a line of a stream has; empty where it has nothing."""
    data = line.removeprefix(b"data: ").strip()
    return json.loads(data) if data and data != b"[DONE]" else {}


def tokens_so_far(chunk: Mapping[str, Any]) -> int:
    """How many tokens a chunk of a stream says that there are."""
    return int((chunk.get("usage") or {}).get("completion_tokens") or 0)


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least ``part`` of all are not above; NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


def in_ms(seconds: Sequence[float]) -> dict[str, float]:
    return {name: round(quantile(seconds, part) * 1e3, 2) for name, part in PARTS.items()}


def buckets(metrics: Samples, name: str) -> dict[float, float]:
    """The histogram ``name``, summed over its labels."""
    found: Counter[float] = Counter()
    for (sample, labels), count in metrics.items():
        if sample == name + "_bucket":
            found[float(dict(labels)["le"])] += count
    return dict(sorted(found.items()))


def grown(before: Buckets, after: Buckets) -> dict[float, float]:
    """What a histogram observed meanwhile."""
    return {edge: count - before.get(edge, 0) for edge, count in after.items()}


def bucket_quantile(observed: Buckets, part: float) -> float:
    """A quantile as Prometheus guesses it: evenly spread in its bucket. NaN of none.

    What is in the last bucket, which has no upper edge, is taken for its lower one.
    """
    total = max(observed.values(), default=0)
    lower, below = 0.0, 0.0
    for edge, count in observed.items():
        if total and count >= part * total:
            inside = (part * total - below) / (count - below) if count > below else 0.0
            return lower if math.isinf(edge) else lower + inside * (edge - lower)
        lower, below = edge, count
    return math.nan


def figures(samples: Sequence[Sample], loads: Buckets, tokens_out: int) -> dict[str, Any]:
    """What one run of one system comes to; times are quantiles in milliseconds.

    ``loads`` are the load times that the connector counted meanwhile, empty where it counts none.
    """
    served = [one for one in samples if not one.error]
    seen = {
        "first_token_ms": [one.first_token_s for one in served],
        "second_token_ms": [one.gaps_s[0] for one in served if one.gaps_s],
        "prefill_leg_ms": [one.prefill_s for one in served if one.prefill_s is not None],
        "decode_leg_ms": [one.decode_s for one in served],
        "decode_gap_ms": [gap for one in served for gap in one.gaps_s],
    }
    told: dict[str, Any] = {name: in_ms(values) for name, values in seen.items() if values}
    if count := int(max(loads.values(), default=0)):
        told["load_ms"] = {name: round(bucket_quantile(loads, part) * 1e3, 2) for name, part in PARTS.items()}
        told["loads"] = count
    took_s = max((one.ended_s for one in samples), default=math.nan)
    return {
        **told,
        "requests": len(samples),
        "failures": dict(Counter(one.error for one in samples if one.error)),
        "failed": len(samples) - len(served),
        "requests_per_s": round(len(served) / took_s, 3),
        "tokens_per_s": round(len(served) * tokens_out / took_s, 1),
        "client_late_ms": in_ms([one.late_s for one in samples]),
        "errors": [one.detail for one in samples if one.error][:_SHOWN_ERRORS],
    }


_RATES = ("requests_per_s", "tokens_per_s")
_COUNTS = ("requests", "failed", "loads")


def over_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of times and rates, sums of what is counted."""
    told: dict[str, Any] = {"rounds": len(rounds)}
    for name in dict.fromkeys(name for one in rounds for name in one):
        values = [one[name] for one in rounds if name in one]
        if name.endswith("_ms"):
            told[name] = {part: statistics.median(value[part] for value in values) for part in PARTS}
        elif name in _RATES:
            told[name] = statistics.median(values)
        elif name in _COUNTS:
            told[name] = sum(values)
    told["failures"] = dict(sum((Counter(one["failures"]) for one in rounds), Counter()))
    told["errors"] = [error for one in rounds for error in one["errors"]][:_SHOWN_ERRORS]
    return told


def ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Every time and rate of one system over that of another, where both have it."""
    told: dict[str, Any] = {}
    for name in (name for name in ours if name in theirs):
        if name.endswith("_ms") and not name.startswith("client"):
            told[name] = {part: _ratio(ours[name][part], theirs[name][part]) for part in PARTS}
        elif name in _RATES:
            told[name] = _ratio(ours[name], theirs[name])
    return told


def _ratio(ours: float, theirs: float) -> float | None:
    return round(ours / theirs, 3) if theirs else None
