"""OpenTelemetry spans for requests that vLLM traces: the load of a request, and the hold of its KV.

With ``--otlp-traces-endpoint`` vLLM passes on the trace that a client names in its ``traceparent``. It makes
its own span, ``llm_request``, in another process after the request has ended and exports no context of it, so
no span can be its child. Ours are its siblings: children of the client's span, from the tracer that vLLM made
for this process.
Imports no vLLM, and OpenTelemetry only for a traced request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvconnect.peer.timeline_page import digest
from kvconnect.timeline import Moment, Record

logger = logging.getLogger(__name__)

_SPANS = {
    Moment.LOADED: ("kvconnect load", Moment.LOAD_ORDERED),
    Moment.FREED: ("kvconnect hold", Moment.COMPUTED),
}
"""By the moment that ends a span: its name, and the moment that begins it."""


class Spans:
    """Traced requests, until they have ended and their KV is not held any more.

    Args:
        clock: the records' monotonic clock, in seconds.
        wall_ns: the wall clock of span times, in nanoseconds.
    """

    def __init__(self, clock: Callable[[], float], wall_ns: Callable[[], int]) -> None:
        self._clock = clock
        self._wall_ns = wall_ns
        # By request id: its trace headers, and its records so far.
        self._traced: dict[str, tuple[Any, list[Record]]] = {}

    def begin(self, request: Any) -> None:
        """Register vLLM's request if it carries trace headers."""
        if headers := getattr(request, "trace_headers", None):
            self._traced[request.request_id] = headers, []

    def end(self, request_id: str) -> None:
        """Drop a request that has ended and whose KV is not held."""
        self._traced.pop(request_id, None)

    def take(self, notes: Iterable[Record]) -> None:
        """Add the scheduler half's new records, and emit the spans that they end."""
        if not self._traced:
            return
        for note in notes:
            if note[3] not in self._traced:
                continue
            headers, records = self._traced[note[3]]
            records.append(note)
            if note[1] in _SPANS:
                try:
                    self._emit(headers, records)
                except Exception:
                    # A failed span must not fail its request.
                    logger.exception("internal error in a span of request %s", note[3])
            if note[1] == Moment.FREED:
                self.end(note[3])

    def _emit(self, headers: Any, records: Sequence[Record]) -> None:
        """Emit the span that the last record ends, if its first record is there."""
        last = records[-1]
        name, first = _SPANS[last[1]]
        began = next((record for record in records if record[1] == first), None)
        if began is None:
            return
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        offset_ns = self._wall_ns() - round(self._clock() * 1e9)
        context = TraceContextTextMapPropagator().extract(headers)
        attributes = {
            "kvconnect.request_id": last[3],
            "kvconnect.handle": digest(began[2]),
            "kvconnect.tokens": began[5],
        }
        span = trace.get_tracer("kvconnect").start_span(
            name, context=context, attributes=attributes, start_time=round(began[0] * 1e9) + offset_ns
        )
        for record in records:
            if began[0] < record[0] < last[0]:
                span.add_event(record[1], timestamp=round(record[0] * 1e9) + offset_ns)
        if last[1] == Moment.LOADED and not last[5]:
            span.set_status(trace.StatusCode.ERROR, "it was not loaded: the worker's log has why")
        span.end(end_time=round(last[0] * 1e9) + offset_ns)
