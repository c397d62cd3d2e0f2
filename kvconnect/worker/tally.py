"""What is counted when a request was sent, or loaded, or was not."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvconnect.metrics import Metrics
from kvconnect.peer.messages import OTHER_IDENTITY, OTHER_PROMPT, OTHER_WEIGHTS
from kvconnect.worker.loads import LoadRecord
from kvconnect.worker.sender import Sending
from kvconnect.worker.transport import REFUSED

logger = logging.getLogger(__name__)

_CAUSES = {
    OTHER_WEIGHTS: "other_weights",
    OTHER_IDENTITY: "other_identity",
    OTHER_PROMPT: "prompt_differs",
    REFUSED: "transport_refused",
}
"""Failures that the operator has to end, by what their text has; all others are counted as a failed load."""


def count_sent(metrics: Metrics, sending: Sending) -> None:
    """A fetch that P served is over."""
    ok = not sending.error
    # A peer that cancelled knows why; after "again" it is to fetch anew.
    failed = "cancelled" if sending.cancelled else "again" if sending.again else "failed"
    metrics.transfers.labels("sent", "ok" if ok else failed).inc()
    metrics.transfer_bytes.labels("sent", sending.lane).inc(sending.total_bytes)
    metrics.copies.labels("sent").inc(sending.outbox.copies)
    metrics.transfer_seconds.labels("sent").inc(sending.seconds)
    if ok and sending.streamed:
        metrics.streamed.inc()
    if not ok and not sending.cancelled:
        metrics.failures.labels("preempted" if sending.again else "send").inc()
        logger.warning("%s could not be sent: %s", sending.lease, sending.error)


def count_pulls(metrics: Metrics, pulls: Iterable[tuple[str, int]]) -> None:
    """What the scheduler half has decided of KV that peers keep, and what became of it."""
    for outcome, num_tokens in pulls:
        metrics.pulls.labels(outcome).inc()
        metrics.pulled_tokens.inc(num_tokens)


def count_loaded(metrics: Metrics, loading: LoadRecord, now: float) -> None:
    """A request that D fetched is over."""
    outcome = "aborted" if loading.aborted else "failed" if loading.error else "ok"
    metrics.transfers.labels("received", outcome).inc()
    if loading.error:
        if not loading.aborted:
            causes = (label for text, label in _CAUSES.items() if text in loading.error)
            otherwise = "load" if loading.order.prefix is None else "pull"
            metrics.failures.labels(next(causes, otherwise)).inc()
        return
    for lane, (total_bytes, copies) in loading.moved.items():
        metrics.transfer_bytes.labels("received", lane).inc(total_bytes)
        metrics.copies.labels("received").inc(copies)
    metrics.transfer_seconds.labels("received").inc(loading.seconds)
    metrics.load_seconds.observe(now - loading.ordered_at)
