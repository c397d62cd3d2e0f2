"""The measurement on two GPUs, as far as it goes without one: its model, its questions and its sums."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from kvconnect.node.children import BadAnswer  # noqa: E402
from tests.vllm import dense_model, measure_gpu  # noqa: E402
from tests.vllm.dense_model import Shape  # noqa: E402
from tests.vllm.measure_gpu import Answer, variants  # noqa: E402
from tests.vllm.pairs import Lines, Pair, Variant  # noqa: E402

TINY = Shape(layers=3, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, positions=128)
OURS, NIXL = Variant("ours", {}), Variant("NixlConnector", None)


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_every_layer_of_the_model_decides_the_output(tmp_path):
    folder = dense_model.write_model(tmp_path / "model", TINY, "cpu").folder
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_pretrained(folder)).float()
    weights = {
        key: weight for path in folder.glob("*.safetensors") for key, weight in load_file(path).items()
    }
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    model.load_state_dict(weights)
    prompts = torch.randint(256, (32, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(prompts[:, -1:], past_key_values=model(prompts[:, :-1]).past_key_values).logits
        assert len(set(expected.argmax(-1).flatten().tolist())) > 16
        for layer in range(TINY.layers):
            cache = model(prompts[:, :-1]).past_key_values
            values = cache.layers[layer].values
            # As if the blocks had been mixed up.
            values.copy_(values.roll(7, dims=2))
            got = model(prompts[:, -1:], past_key_values=cache).logits
            assert (got.argmax(-1) != expected.argmax(-1)).float().mean() > 0.4, layer


def test_a_model_is_written_once(tmp_path):
    folder = dense_model.write_model(tmp_path, TINY, "cpu").folder
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "rest.safetensors", "layer2.safetensors"} <= set(before)
    dense_model.write_model(tmp_path, TINY, "cpu")
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_variants():
    given = measure_gpu.parsed(
        ["--extra", '{"engine":"nixl","protocol":"UCX"}', "--extra", '{"engine":"mooncake"}']
    )
    names = [variant.name for variant in given.variants]
    assert names == ["kvconnect(engine=nixl,protocol=UCX)", "kvconnect(engine=mooncake)", "NixlConnector"]
    ucx, mooncake, nixl = (variant.config("producer") for variant in given.variants)
    for config, engine, protocol in ((ucx, "nixl", "UCX"), (mooncake, "mooncake", "auto")):
        assert config["kv_connector_extra_config"] == {"engine": engine, "protocol": protocol}
    assert (ucx["kv_role"], nixl["kv_connector"]) == ("kv_producer", "NixlConnector")
    assert [variant.name for variant in variants(["kvconnect"], [])] == ["kvconnect(engine=nixl)"]


@pytest.mark.parametrize(("connectors", "extras"), [(["other"], []), (["kvconnect"], ["{}", "{}"])])
def test_wrong_variants_are_refused(connectors, extras):
    with pytest.raises(ValueError, match="other|twice"):
        variants(connectors, extras)


@pytest.fixture
def answering():
    """A server that answers every question with what is put into ``answers``: bytes, or a status."""
    answers = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    asked: list = []
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield SimpleNamespace(name="decode", port=server.server_port), answers, asked
        server.shutdown()
        thread.join()


def chunk(tokens):
    return b"data: " + json.dumps({"choices": [{"text": "", "token_ids": tokens}]}).encode() + b"\n\n"


def test_streamed_tokens_are_gathered(answering):
    server, answers, asked = answering
    answers.append((200, chunk(None) + chunk([1]) + chunk([2, 3]) + b"data: [DONE]\n\n"))
    answer = measure_gpu.ask(server, [5, 6], max_tokens=3)
    assert answer.tokens == [1, 2, 3]
    assert answer.first_token_s > 0
    assert asked[0].items() >= {"prompt": [5, 6], "max_tokens": 3, "stream": True}.items()


@pytest.mark.parametrize(
    "answer",
    [
        (500, b"no"),
        (200, chunk([1])),
        (200, b'data: {"error": {"message": "load failed"}}\n\n'),
    ],
)
def test_no_wrong_answer_is_measured(answering, answer):
    server, answers, _ = answering
    answers.append(answer)
    with pytest.raises(BadAnswer, match="decode"):
        measure_gpu.ask(server, [5])


def test_a_transfer_is_the_growth_of_its_series():
    before = {"vllm:nixl_bytes_transferred_sum": 1e9, "vllm:nixl_xfer_time_seconds_sum": 1.0}
    after = {
        "vllm:nixl_bytes_transferred_sum": 5e9,
        "vllm:nixl_xfer_time_seconds_sum": 1.5,
        "vllm:nixl_num_descriptors_sum": 30,
        "vllm:kvconnect_transfer_bytes_total": 9.0,
        "vllm:request_queue_time_seconds_sum": 0.6,
        "vllm:request_prefill_time_seconds_sum": 0.25,
    }
    request = {"queued_s": 0.6, "step_s": 0.25}
    moved = measure_gpu.transferred(NIXL, before, after)
    assert moved == {"bytes": 4e9, "transfer_s": 0.5, "posting_s": 0, "copies": 30, "gb_per_s": 8, **request}
    ours = measure_gpu.transferred(OURS, before, after)
    assert ours == {"bytes": 9.0, "transfer_s": 0, "load_s": 0, "copies": 0, **request}


def test_prompts_that_scatter_a_pool_grow_side_by_side(answering):
    server, answers, asked = answering
    server.url = f"http://127.0.0.1:{server.port}"
    answers.append((200, b"{}"))
    measure_gpu.scatter(server, num_blocks=2112, blocks_each=5, block_size=16)
    (body,) = asked
    assert {len(prompt) for prompt in body["prompt"]} == {1}
    # Together as many blocks as asked for, all of them full in the end.
    assert len(body["prompt"]) * 5 >= 2112
    assert (1 + body["max_tokens"], body["ignore_eos"]) == (5 * 16, True)


def test_what_is_asked_in_turns(monkeypatch):
    asked = []

    def measured(pair, prompt):
        asked.append((pair.variant.name, tuple(prompt)))
        if pair.prefill is None and len(asked) > 6:
            raise BadAnswer("gone")
        output = [1] if pair.variant is OURS else [len(asked) % 4]
        return {"first_token_s": len(asked) / 1e3, "bytes": 8, "output": output}

    server = SimpleNamespace(name="server", tail=lambda: "its log")
    monkeypatch.setattr(measure_gpu, "measured", measured)
    monkeypatch.setattr(measure_gpu, "ask", lambda server, prompt: Answer(0.5, [1]))
    told = io.StringIO()
    pairs = [Pair(OURS, server, server), Pair(NIXL, server, server)]
    measure_gpu.compare(pairs, [10, 20], 2, Lines(told))
    # Both get the same prompt, a new one in every turn.
    assert [prompt for _, prompt in asked[::2]] == [prompt for _, prompt in asked[1::2]]
    assert len({prompt for _, prompt in asked}) == 6
    medians = [line for line in lines_of(told.getvalue()) if line["kind"] == "median"]
    assert [(line["connector"], line["tokens"]) for line in medians] == [
        ("ours", 10),
        ("NixlConnector", 10),
        ("ours", 20),
        ("NixlConnector", 20),
    ]
    # The first turn does not count: of requests 3 to 6, ours are 3 and 5.
    expected = {"kind": "median", "connector": "ours", "tokens": 10, "rounds": 2, "first_token_ms": 4.0}
    assert medians[0] == expected | {"local_ms": 500.0, "bytes": 8, "like_local": 2, "like_first": 2}
    assert medians[1]["like_first"] == 0


def test_a_pair_that_fails_is_left_out(monkeypatch, capsys):
    server = SimpleNamespace(name="server", tail=lambda: "its log")

    def measured(pair, prompt):
        if pair.variant is NIXL:
            raise BadAnswer("gone")
        return {"first_token_s": 1.0, "bytes": 8, "output": [1]}

    monkeypatch.setattr(measure_gpu, "measured", measured)
    monkeypatch.setattr(measure_gpu, "ask", lambda server, prompt: Answer(0.5, [1]))
    told = io.StringIO()
    pairs = [Pair(NIXL, server, server), Pair(OURS, server, server)]
    measure_gpu.compare(pairs, [10], 3, Lines(told))
    kinds = [(line["kind"], line["connector"]) for line in lines_of(told.getvalue())]
    assert kinds.count(("failure", "NixlConnector")) == 1
    assert kinds[-1] == ("median", "ours")
    assert "its log" in capsys.readouterr().out
