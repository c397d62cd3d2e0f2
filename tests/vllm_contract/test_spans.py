"""What a traced request leaves with OpenTelemetry: spans below the client's, by the SDK that vLLM brings."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.v1.engine import core
from vllm.v1.request import Request

from kvconnect.peer.timeline_page import digest
from kvconnect.timeline import Moment
from kvconnect.vllm.spans import Spans

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
OFFSET_NS = 1_700_000_000 * 10**9
"""How far the wall clock is ahead of the monotonic one."""


@pytest.fixture(scope="module")
def exporter():
    made = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


@pytest.fixture
def spans(exporter):
    exporter.clear()
    return Spans(lambda: 100.0, lambda: 100 * 10**9 + OFFSET_NS)


def note(at, moment, request_id="r", handle="h", number=0):
    return at, moment, handle, request_id, 0, number


def test_vllm_hands_on_what_a_client_names_and_traces_in_its_engine_core():
    assert "trace_headers" in inspect.signature(Request.__init__).parameters
    assert "maybe_init_worker_tracer(" in inspect.getsource(core)


def test_a_load_is_a_span_of_the_clients_trace_with_what_happened_meanwhile(spans, exporter):
    spans.begin(SimpleNamespace(request_id="r", trace_headers=HEADERS))
    spans.take([note(1.0, Moment.QUEUED), note(2.0, Moment.LOAD_ORDERED, number=40)])
    spans.take([note(2.5, Moment.QUEUED, "other"), note(2.25, Moment.ADMITTED)])
    spans.take([note(3.0, Moment.LOADED, number=1)])
    (span,) = exporter.get_finished_spans()
    assert span.name == "kvconnect load"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == CLIENT
    assert (span.start_time - OFFSET_NS, span.end_time - OFFSET_NS) == (2 * 10**9, 3 * 10**9)
    assert [(event.name, event.timestamp - OFFSET_NS) for event in span.events] == [
        ("admitted", 2_250_000_000)
    ]
    wanted = {"kvconnect.request_id": "r", "kvconnect.handle": digest("h"), "kvconnect.tokens": 40}
    assert dict(span.attributes) == wanted
    assert span.status.status_code is trace.StatusCode.UNSET
    spans.end("r")
    assert not spans._traced


def test_a_load_that_failed_says_so(spans, exporter):
    spans.begin(SimpleNamespace(request_id="r", trace_headers=HEADERS))
    spans.take([note(2.0, Moment.LOAD_ORDERED), note(3.0, Moment.LOADED, number=0)])
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.ERROR


def test_what_is_held_is_a_span_until_its_blocks_are_free(spans, exporter):
    spans.begin(SimpleNamespace(request_id="r", trace_headers=HEADERS))
    spans.take([note(1.0, Moment.QUEUED), note(2.0, Moment.COMPUTED)])
    assert not exporter.get_finished_spans()
    spans.take([note(5.0, Moment.FREED, handle="")])
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.end_time - span.start_time) == ("kvconnect hold", 3 * 10**9)
    assert not spans._traced


def test_a_request_that_is_not_traced_leaves_nothing_and_costs_nothing(spans, exporter):
    for request in (SimpleNamespace(request_id="r"), SimpleNamespace(request_id="r", trace_headers=None)):
        spans.begin(request)
    spans.take([note(2.0, Moment.LOAD_ORDERED), note(3.0, Moment.LOADED, number=1)])
    assert not spans._traced
    assert not exporter.get_finished_spans()


def test_an_error_of_the_tracer_is_logged_and_nothing_else(spans, monkeypatch, caplog):
    monkeypatch.setattr(trace, "get_tracer", lambda name: 1 / 0)
    spans.begin(SimpleNamespace(request_id="r", trace_headers=HEADERS))
    spans.take([note(2.0, Moment.LOAD_ORDERED), note(3.0, Moment.LOADED, number=1)])
    assert "internal error in a span" in caplog.text
