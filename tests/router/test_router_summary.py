"""What the router logs every few seconds, and once a minute in which nothing was fetched."""

from __future__ import annotations

import logging

import pytest

from kvconnect.router.metrics import RouterMetrics
from kvconnect.router.summary import Summaries


@pytest.fixture
def metrics() -> RouterMetrics:
    return RouterMetrics()


def count(metrics: RouterMetrics, alone: int, both: int, reason: str = "empty_params") -> None:
    metrics.requests.labels("/v1/completions", "200").inc(both)
    metrics.flows.labels("sequential").inc(both)
    metrics.fallbacks.labels(reason).inc(alone)


def test_a_summary_has_what_happened_since_the_last_one(metrics, caplog):
    count(metrics, 1, 5)
    summaries = Summaries(metrics)
    with caplog.at_level(logging.INFO):
        summaries.log()
        assert not caplog.messages
        count(metrics, 2, 3)
        summaries.log()
        summaries.log()
    (said,) = caplog.messages
    assert said.startswith("3 requests in 10 s (/v1/completions 200 3); to both nodes: sequential 3; ")
    assert "by the decode node alone: empty_params 2" in said


@pytest.mark.parametrize(
    ("alone", "reason", "warned"),
    [(7, "prefill_unreachable", True), (6, "prefill_unreachable", False), (7, "beam_search", False)],
)
def test_a_minute_in_which_every_request_was_computed_by_the_decode_node_is_warned_of(
    metrics, caplog, alone, reason, warned
):
    summaries = Summaries(metrics)
    with caplog.at_level(logging.WARNING):
        count(metrics, alone, 7, reason)
        for _ in range(12):
            summaries.log()
    assert ["all of the last minute's 7 requests" in said for said in caplog.messages] == [True] * warned
