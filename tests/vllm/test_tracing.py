"""Real vLLM servers that trace: what a collector gets of a request, and what ``inspect --trace`` reads."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvconnect.node.children import COMMAND
from kvconnect.tools.timelines import PHASES
from tests.vllm.servers import ASK_FOR_KV, pair, random_prompt
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.full, pytest.mark.servers]
TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes what is exported over HTTP; ``spans`` are all of them."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Taker)
        self.spans = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def of_client(self):
        """Those of the client's trace, by name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == TRACE}

    def wait_for(self, *names):
        deadline = time.monotonic() + 30
        while not set(names) <= self.of_client().keys():
            assert time.monotonic() < deadline, f"of {names} there are {sorted(self.of_client())}"
            time.sleep(0.1)


class Taker(BaseHTTPRequestHandler):
    def do_POST(self):
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in sent.resource_spans:
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def collector():
    with Collector() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def servers(collector, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tracing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        options = ["--otlp-traces-endpoint", collector.url]
        with pair(write_model("gqa", folder), folder, "nixl", options=options) as both:
            yield both


def asked(server, prompt, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    headers = {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-{CLIENT}-01"}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def test_a_request_that_is_traced_leaves_spans_and_a_timeline(servers, collector, tmp_path):
    prefill, decode = servers
    prompt = random_prompt(700, 5)
    params = asked(prefill, prompt, max_tokens=1, kv_transfer_params=ASK_FOR_KV)["kv_transfer_params"]
    asked(decode, prompt, kv_transfer_params=params)
    prefill.wait_idle()
    # What became of a hold is known with the next step.
    prefill.tokens([1, 2, 3])
    collector.wait_for("llm_request", "kvconnect hold", "kvconnect load")
    spans = collector.of_client()
    assert {span.parent_span_id.hex() for span in spans.values()} == {CLIENT}, "vLLM's own and ours"
    hold, load = spans["kvconnect hold"], spans["kvconnect load"]
    assert hold.start_time_unix_nano < load.start_time_unix_nano < load.end_time_unix_nano
    handles = {
        a.value.string_value for it in (hold, load) for a in it.attributes if a.key == "kvconnect.handle"
    }
    assert len(handles) == 1, "both are of one handle"

    out = tmp_path / "trace.json"
    command = [*COMMAND, "inspect", prefill.url, decode.url, "--trace", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["load", *PHASES, "late", "request"]
    events = json.loads(out.read_text())["traceEvents"]
    assert handles == {event["args"]["handle"] for event in events if event["name"] == "to loaded"}
    names = {event["name"] for event in events if event["ph"] == "X"}
    halves = {"to queued", "to prefill launched", "to prefill done", "to load ordered", "to first token"}
    assert (
        halves | {"to held", "to fetch begun", "write", "unpack", "to reported", "to blocks freed"} <= names
    )
