"""Plain HTTP to the demo's children, with deadlines."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvconnect.errors import KVConnectError

# The children are on this machine: a proxy that the environment names is not for them.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class BadAnswer(KVConnectError):
    """A child answered with an error, or not at all."""


def fetch(url: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> bytes:
    """GET ``url``, or POST ``body`` to it as JSON.

    Raises ``BadAnswer``: no answer, or a status other than 200; the text holds its body's beginning.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with _opener.open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read(500).decode(errors="replace")
        raise BadAnswer(f"{url} answered {error.code}: {text}") from error
    except OSError as error:
        raise BadAnswer(f"{url} gave no answer: {error}") from error


def fetch_json(url: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
    """The same, with its JSON parsed. Raises BadAnswer: no answer, an error, or no JSON."""
    raw = fetch(url, body, timeout_s)
    try:
        return json.loads(raw)
    except ValueError as error:
        raise BadAnswer(f"{url} answered something that is not JSON: {raw[:200]!r}") from error


def answers(url: str, timeout_s: float = 5.0) -> bool:
    """Whether a URL answers with 200."""
    try:
        fetch(url, timeout_s=timeout_s)
    except BadAnswer:
        return False
    return True


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse_metrics(text: str) -> Samples:
    """Prometheus' text format as name and sorted labels to value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def read_metrics(url: str) -> Samples:
    """The metrics of a child."""
    return parse_metrics(fetch(url + "/metrics").decode())


def growth(before: Samples, after: Samples, name: str, **labels: str) -> float:
    """By how much a counter grew, summed over all samples that carry ``labels``."""
    return sum(
        value - before.get((sample, pairs), 0.0)
        for (sample, pairs), value in after.items()
        if sample == name and labels.items() <= dict(pairs).items()
    )
