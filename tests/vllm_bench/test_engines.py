"""What engines do one request after the other: hand over, refuse, reset, and show what they hold."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvconnect.errors import ConfigError
from kvconnect.tools.inspect_runner import look
from tests.ports import free_port
from tests.vllm_bench.engine import Engine
from tests.vllm_bench.links import Links
from tests.vllm_bench.model import MODELS, Group, Model
from tests.vllm_bench.pair import CAPACITY, EXTRA, Engines, Setup
from tests.vllm_bench.reference import continuation
from tests.vllm_bench.settings import EngineSettings

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def begun():
    """Makes the two engines of a pair, by their models and what else distinguishes them."""
    with ExitStack() as stack:

        def make(prefill, decode, settings=None, extra=None, **fields):
            more = {"capacity": CAPACITY, "layout": "LBNHC", "extra": {**EXTRA, **(extra or {})}}
            more["links"] = Links()
            both = (
                Engine("prefill", prefill, role="kv_producer", **more),
                Engine("decode", decode, role="kv_consumer", fields=fields, **more),
            )
            for engine in both:
                stack.callback(engine.close)
                engine.begin(settings or EngineSettings(), random.Random(0))
            return both

        yield make


@pytest.mark.parametrize("kind", ["windows", "chunked+full", "latent+latent_window", "state+full"])
def test_a_prompt_of_any_length_is_handed_over_exactly(begun, kind):
    """The decode node computes the last token again: what that one sees must be there.

    Of lengths whose window begins with a block, of whole chunks, and of all others.
    """
    prefill, decode = begun(MODELS[kind], MODELS[kind])
    for length in range(1, 100):
        prompt, name = [length, *range(length - 1)], f"{length} tokens"
        decode.add(name, prompt, 3, prefill.prefilled(name, prompt))
        assert decode.complete(name, prefill) == "length"
        assert decode.outputs[name] == continuation(decode.model.sights, prompt, 3), name


# The window begins in the block that the request goes on with, which is cached once it is full.
NARROW = Model("narrow", (Group("full"), Group("window", sees=5)))


@pytest.mark.parametrize("model", [MODELS["windows"], MODELS["chunked+full"], NARROW], ids=lambda it: it.name)
@pytest.mark.parametrize("is_async", [False, True])
def test_no_other_prompt_gets_a_block_of_a_window_that_a_peer_filled_in_part(begun, model, is_async):
    """The prefill node has blocks half as long: of one that a window begins in it may lack a part."""
    shorter = replace(model, groups=tuple(replace(group, block_size=8) for group in model.groups))
    prefill, decode = begun(shorter, model, EngineSettings(is_async=is_async))
    for length in range(40, 140, 9):
        # No earlier prompt begins like this one.
        prompt, name = [length, *range(length - 1)], f"{length} tokens"
        decode.add(name, prompt, 40, prefill.prefilled(name, prompt))
        decode.complete(name, prefill)
        answer = continuation(model.sights, prompt, 40)
        assert decode.outputs[name] == answer, name
        whole = [*prompt, *answer]
        for end in range(17, len(whole), 5):
            turn = [*whole[:end], 249]
            decode.add(f"{name}, {end}", turn, 2)
            decode.complete(f"{name}, {end}")
            assert decode.outputs[f"{name}, {end}"] == continuation(model.sights, turn, 2), (name, end)


@pytest.mark.parametrize(("field", "refused"), [("rms_norm_eps", True), ("transformers_version", False)])
def test_servers_whose_kv_means_something_else_exchange_none(begun, field, refused):
    """And those that only look different do. A request that is refused is computed."""
    prefill, decode = begun(MODELS["full"], MODELS["full"], **{field: 0.5})
    prompt = list(range(60))
    decode.add("a", prompt, 3, prefill.prefilled("a", prompt))
    while not seen(prefill)[1].leases:
        # What holds it comes with the orders of a later step, before which no load is known to end.
        prefill.step()
    decode.complete("a", *([] if refused else [prefill]))
    counted = decode.worker._worker.changes().counters
    assert ("other_identity" in counted.get("failures", {})) is refused
    assert ("received,ok" in counted["transfers"]) is not refused
    assert decode.outputs["a"] == continuation(decode.model.sights, prompt, 3)


def test_a_worker_shows_its_leases_peers_and_tiers(begun):
    offload = {"offload": {"cpu_bytes": 1 << 20, "checkpoint_tokens": 32}}
    prefill, decode = begun(MODELS["windows"], MODELS["windows"], extra=offload)
    prompt = list(range(60))
    params = prefill.prefilled("a", prompt)
    described, found = seen(prefill)
    while not found.leases or found.leases[0]["state"] != "held":
        # What holds it comes with the orders of a later step.
        prefill.step()
        described, found = seen(prefill)
    assert (described.role, found.engine_id) == ("kv_producer", "prefill")
    assert "vllm" in described.versions
    (lease,) = found.leases
    assert lease["request_id"].startswith("a")
    # D computes the last token of the prompt itself.
    assert (lease["tokens"], lease["blocks"] > 0) == (len(prompt) - 1, True)
    decode.add("a", prompt, 3, params)
    decode.complete("a", prefill)
    (described, found), (_, sent) = seen(decode), seen(prefill)
    assert described.role == "kv_consumer"
    assert [(peer["engine_id"], peer["direction"]) for peer in found.peers] == [("prefill", "received")]
    assert (found.leases, found.loads, sent.leases) == ((), (), ())
    host = sent.tiers["host"]
    assert 0 < host["taken_bytes"] <= host["limit_bytes"] <= 1 << 20


def seen(engine):
    transfer = engine.worker._worker.transfer
    address = transfer.address()
    return look(transfer._config.extra, None, (address.host, address.port), whole=True)


def test_a_request_that_is_traced_leaves_the_span_of_its_hold_and_of_its_load(begun, monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    traced = {"trace_headers": {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}}
    prefill, decode = begun(MODELS["full"], MODELS["full"])
    decode.add("a", [*range(60)], 3, prefill.prefilled("a", [*range(60)], **traced), **traced)
    decode.complete("a", prefill)
    for engine in (prefill, decode):
        # What became of a hold is known with the next step.
        engine.add("next", [1, 2, 3], 1)
        engine.complete("next")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {"kvconnect hold", "kvconnect load"}
    assert {f"{span.parent.span_id:016x}" for span in spans.values()} == {"b" * 16}
    assert len({span.attributes["kvconnect.handle"] for span in spans.values()}) == 1


def test_an_offload_that_is_refused_leaves_no_side_channel_open(tmp_path):
    """vLLM drops a worker that cannot be set up: what it opened is closed."""
    (tmp_path / "file").touch()
    offload = {"cpu_bytes": 1 << 20, "disk_path": str(tmp_path / "file"), "disk_bytes": 1 << 20}
    extra = {"engine": "memory", "insecure": True, "port": free_port(), "offload": offload}
    more = {"capacity": 64, "layout": "LBNHC", "extra": extra, "links": Links()}
    for _ in range(2):
        # What listens at the port was closed the first time.
        with pytest.raises(ConfigError, match="disk_path"):
            Engine("decode", MODELS["full"], role="kv_both", **more)


# ``reset_prefix_cache`` under load: running requests are preempted, and begin anew at once.
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=["full", "window+full", "aligned+full"])
def alone(request):
    made = Engines(Setup("offload", MODELS[request.param], ("LBNHC", "LBNHC"), 1 << 20))
    yield made.all[0]
    made.close()


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize(("is_async", "is_v2"), [(False, False), (True, True)])
def test_what_is_kept_of_a_request_that_was_reset_is_right(alone, is_async, is_v2, num_drafts, external):
    """At every step of its answer; then others ask the same, and have nothing but what was kept."""
    settings = EngineSettings(is_async=is_async, is_v2=is_v2, num_drafts=num_drafts)
    prompt = list(range(15))
    expected = continuation(alone.model.sights, prompt, NUM_TOKENS)
    for num_steps in range(1, NUM_TOKENS):
        alone.begin(settings, random.Random(num_steps))
        alone.add("first", prompt, NUM_TOKENS)
        for _ in range(num_steps):
            alone.step()
        alone.reset(running=True, external=external)
        assert alone.complete("first") == "length"
        alone.reset(running=False, external=False)
        alone.add("second", prompt, NUM_TOKENS)
        assert alone.complete("second") == "length"
        assert alone.outputs == {"first": expected, "second": expected}
        assert not alone.leftovers()
