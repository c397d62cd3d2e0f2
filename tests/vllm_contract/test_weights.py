"""What weights are called: by the tensors of their files, or by those in memory. Runs without vLLM."""

from __future__ import annotations

import json
import logging
import random
import shutil
import struct
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvconnect.cache.identity import weights_differ
from kvconnect.runner_kit.checkpoint_files import files_name
from kvconnect.vllm.weights import (
    LoadedWeights,
    _embeddings_name,
    checkpoint_name,
    embedding_sums,
    loaded_weights,
    tensors_digest,
)

LAYERS = 40


def tensors(seed=0, layers=LAYERS, **changes):
    """Made-up weights by name, as bytes of float32."""
    rng = random.Random(seed)
    made = {"embed.weight": rng.randbytes(4 * 512)}
    for layer in range(layers):
        for part in ("q", "k", "mlp.up"):
            made[f"layers.{layer}.{part}.weight"] = rng.randbytes(4 * 256)
    return {**made, **changes}


def write(folder, files):
    """Safetensors files by hand: a header's length, the header, the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        header, at = {"__metadata__": {"made_in": str(folder)}}, 0
        for tensor, data in content.items():
            header[tensor] = {
                "dtype": "F32",
                "shape": [len(data) // 4],
                "data_offsets": [at, at + len(data)],
            }
            at += len(data)
        text = json.dumps(header).encode()
        data = b"".join(content.values())
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def one_file(folder, content):
    return write(folder, {"model.safetensors": content})


def config(model, weights="", revision=None, load_format="auto", **more):
    return (
        SimpleNamespace(model=str(model), model_weights=weights, revision=revision, **more),
        SimpleNamespace(load_format=load_format, download_dir=None),
    )


# Files


def test_equal_weights_have_one_name_wherever_they_lie(tmp_path):
    made = tensors()
    first = one_file(tmp_path / "mnt" / "models", made)
    (first / "README.md").write_text("anything")
    assert files_name(first) == files_name(one_file(tmp_path / "elsewhere", made))
    half = len(made) // 2
    parts = dict(list(made.items())[:half]), dict(list(made.items())[half:])
    split = write(tmp_path / "split", {f"model-{n}.safetensors": part for n, part in enumerate(parts)})
    assert files_name(split) == files_name(first), "nor how they are spread over files"
    assert files_name(first / "model.safetensors") == files_name(first)


@pytest.mark.parametrize("what", ["all", "one kind", "name", "shape", "one fewer"])
def test_two_fine_tunes_under_one_path_have_two_names(tmp_path, what):
    made = tensors()
    before = files_name(one_file(tmp_path, made))
    if what == "all":
        made = tensors(1)
    elif what == "one kind":
        made |= {f"layers.{n}.q.weight": bytes(4 * 256) for n in range(0, LAYERS, 4)}
    elif what == "name":
        made["embed.weights"] = made.pop("embed.weight")
    elif what == "shape":
        made["embed.weight"] += bytes(4)
    else:
        del made["embed.weight"]
    assert files_name(one_file(tmp_path, made)) != before


FEW = {f"layers.{n}.w": struct.pack("<I", n) for n in range(3000)}
MANY = {f"layers.{n}.experts.{e}.up": struct.pack("<I", n * e) for n in range(60) for e in range(100)}
# Experts must not crowd out the few tensors of another kind.
MOST = {f"layers.{n}.experts.{e}.up": struct.pack("<I", n * e) for n in range(20) for e in range(500)}
MOST |= {f"layers.{n}.{part}": struct.pack("<I", n) for n in range(10) for part in ("o_proj", "q_norm")}


@pytest.mark.parametrize(
    ("made", "changes"),
    [
        (FEW, ["layers.1234.w"]),
        (MANY, ["layers.31.experts.77.up"]),
        # Of a module one tensor is looked at, and of what there are few all.
        (MOST, ["layers.7.o_proj", "layers.7.q_norm"]),
    ],
    ids=["each tensor", "each expert", "each kind"],
)
def test_of_very_many_tensors_something_of_all_is_looked_at(tmp_path, made, changes):
    before = files_name(one_file(tmp_path, made))
    for changed in changes:
        assert files_name(one_file(tmp_path, {**made, changed: b"abcd"})) != before, changed


def test_what_is_read_twice_or_not_at_all_does_not_count(tmp_path):
    made = tensors()
    alone = one_file(tmp_path / "alone", made)
    beside = one_file(tmp_path / "beside", made)
    write(beside, {"consolidated.safetensors": {"w": b"same"}})
    (beside / "pytorch_model.bin").write_bytes(b"the same in another form")
    (beside / "original").mkdir()
    (beside / "original" / "consolidated.00.pth").write_bytes(b"and once more")
    assert files_name(beside) == files_name(alone)
    write(beside, {"left-over.safetensors": tensors(3)})
    (beside / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(made, "model.safetensors")})
    )
    assert files_name(beside) == files_name(alone)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("name", ["model.bin", "model.gguf", "broken.safetensors"])
def test_files_of_other_kinds_count_by_size_and_samples(tmp_path, place, name):
    content = bytearray(random.Random(2).randbytes(1 << 20))
    (tmp_path / name).write_bytes(content)
    before = files_name(tmp_path)
    assert before is not None
    content[place] ^= 1
    (tmp_path / name).write_bytes(content)
    assert files_name(tmp_path) != before


def test_a_folder_without_weights_has_no_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert files_name(tmp_path) is None


def test_a_header_that_lies_is_no_reason_to_fail(tmp_path):
    for text in (b"[]", b'{"a": {}}', b'{"a": 1}', b'{"a": {"dtype": 1, "shape": 2, "data_offsets": []}}'):
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
        assert files_name(tmp_path) is not None


# Which files


def test_what_is_streamed_from_an_object_store_is_not_told_by_its_address(tmp_path):
    """The folder that vLLM gives such a model has its configuration only."""
    (tmp_path / "config.json").write_text("{}")
    for address in ("s3://bucket/a", "gs://bucket/a"):
        assert checkpoint_name(*config(tmp_path, address, load_format="runai_streamer")) is None
    mounted = one_file(tmp_path / "mounted", tensors())
    assert checkpoint_name(*config(tmp_path, str(mounted))) == files_name(mounted)


def test_weights_that_are_made_up_are_not_told_by_the_files_beside_them(tmp_path):
    one_file(tmp_path, tensors())
    assert checkpoint_name(*config(tmp_path)) == files_name(tmp_path)
    assert checkpoint_name(*config(tmp_path, load_format="dummy")) is None
    assert checkpoint_name(*config(tmp_path / "not there")) is None


def test_a_pinned_revision_of_a_hub_model_is_what_a_copy_of_it_is(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    commit = "1234567890123456789012345678901234567890"
    repository = tmp_path / "cache" / "models--some--model"
    snapshot = one_file(repository / "snapshots" / commit, tensors())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    copy = tmp_path / "mnt" / "models"
    shutil.copytree(snapshot, copy)
    model, load = config("some/model")
    load.download_dir = str(tmp_path / "cache")
    assert checkpoint_name(model, load) == files_name(copy)
    model.revision = commit
    assert checkpoint_name(model, load) == files_name(copy)
    model.revision = "another"
    assert checkpoint_name(model, load) is None


# In memory


class Runner:
    """As vLLM's: what registers its caches is among the callers."""

    def __init__(self, model):
        self.model = model

    def get_model(self):
        return self.model

    def initialize_kv_cache(self, vllm_config):
        return loaded_weights(vllm_config)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 300), nn.Linear(300, 16), nn.LayerNorm(16)).to(torch.bfloat16)


def alone(value):
    return [value]


def ranks(*checkpoints, models):
    """Two ranks that are asked in turn; what each says is there when both have said it."""
    told = [
        (name, tensors_digest([model] if model else []), embedding_sums([model]))
        for name, model in zip(checkpoints, models, strict=True)
    ]
    return [
        LoadedWeights(name, [model], lambda _: told).names
        for (name, *_), model in zip(told, models, strict=True)
    ]


def test_weights_that_are_replaced_in_place_get_another_name_and_get_it_back():
    model, others = network(), network(1).state_dict()
    weights = LoadedWeights("1", [model], alone)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not weights.check(), "caches may be reset for other reasons"
    model.load_state_dict(others)
    assert weights.check()
    assert not weights.check()
    assert weights.names == LoadedWeights(None, [network(1)], alone).names, "as on one of the same update"
    restarted = LoadedWeights("2", [network(1)], alone).names
    assert not weights_differ(weights.names, restarted), "nor is one that loads the update from files another"
    assert weights_differ(weights.names, LoadedWeights("1", [network()], alone).names)
    model.load_state_dict(first)
    assert weights.check()
    assert weights.names["files"] == "1"


def table(rows, first=0, whole=True):
    """A table of embeddings, or a rank's part of one, as vLLM pads it."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.cat([rows, torch.full((3, rows.shape[1]), 7.0, dtype=rows.dtype)]))
    module.org_vocab_size = 300
    module.shard_indices = SimpleNamespace(org_vocab_start_index=first, num_org_elements=len(rows))
    return nn.Sequential(module)


def test_every_row_of_a_table_counts_however_it_is_divided():
    torch.manual_seed(3)
    rows = torch.randn(300, 24).to(torch.bfloat16)

    def name(*parts):
        return _embeddings_name([embedding_sums([part]) for part in parts])

    whole = name(table(rows))
    assert whole.startswith("bfloat16 ")
    assert name(table(rows[:160]), table(rows[160:], 160)) == whole
    assert name(table(rows), table(rows)) == whole, "pipeline ranks with a copy of it"
    for row, column in ((0, 0), (137, 23), (299, 5)):
        other = rows.clone()
        other[row, column] += 1
        assert name(table(other)) != whole
    swapped = rows.clone()
    swapped[[4, 9]] = swapped[[9, 4]]
    assert name(table(swapped)) != whole
    model = table(rows)
    weights = LoadedWeights("1", [model], alone)
    model[0].weight.data[137, 23] += 1
    assert weights.check(), "also where no sample of the tensors has it"


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(4, 8, 8))

    def get_expert_weights(self):
        return [self.w13]


def test_experts_that_move_between_ranks_are_no_other_weights():
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), nn.Linear(8, 8))
    weights = LoadedWeights("1", [model], alone, experts_move=True)
    with torch.no_grad():
        model[0].w13.copy_(model[0].w13[[2, 0, 3, 1]])
    assert not weights.check()
    assert weights.names["files"] == "1"
    with torch.no_grad():
        model[1].weight += 1
    assert weights.check(), "the rest of the model is looked at"
    assert LoadedWeights("1", [model], alone).check() is False


@pytest.mark.parametrize("what", ["few values", "through data", "one layer"])
def test_small_changes_are_seen(what):
    model = network()
    weights = LoadedWeights("1", [model], alone)
    with torch.no_grad():
        if what == "few values":
            model[0].weight.view(-1)[::500] += 1
        elif what == "through data":
            model[1].weight.data.copy_(model[1].weight.data * 2)
        else:
            model[2].bias += 1
    assert weights.check()


def test_tensors_of_every_make_are_looked_at():
    model = nn.Module()
    model.transposed = nn.Parameter(torch.randn(8, 4).t())
    model.part = nn.Parameter(torch.randn(100)[::3])
    model.small = nn.Parameter(torch.tensor(1.0))
    model.none = nn.Parameter(torch.empty(0))
    model.fp8 = nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    model.packed = nn.Parameter(torch.arange(9, dtype=torch.int32), requires_grad=False)
    seen = {tensors_digest([model])}
    for name in ("transposed", "part", "small", "packed"):
        getattr(model, name).data.view(-1 if name == "small" else getattr(model, name).shape).add_(1)
        seen.add(tensors_digest([model]))
    assert len(seen) == 5
    assert None not in seen


def test_all_ranks_have_one_name():
    models = network(0), network(1)
    assert [names["files"] for names in ranks("1", "1", models=models)] == ["1", "1"]
    first, second = ranks(None, None, models=models)
    assert first == second
    assert first["tensors"].endswith("over 2 ranks")
    assert ranks("1", None, models=models) == [first, first], "also where one of them sees no files"


def test_a_change_on_one_rank_is_one_on_all():
    mine, other = network(0), network(1)
    told = [("1", tensors_digest([mine]), []), ("1", tensors_digest([other]), [])]
    weights = LoadedWeights(
        "1", [mine], lambda value: told if value[0] == "1" else [value, (False, b"x", [])]
    )
    assert weights.check()
    assert weights.names["tensors"].endswith("over 2 ranks")


def test_what_cannot_be_told_is_a_name_of_its_own_each_time(caplog):
    caplog.set_level(logging.WARNING, "kvconnect")
    logging.getLogger("kvconnect").propagate = True
    made = [LoadedWeights(None, [], alone) for _ in range(2)]
    assert made[0].names != made[1].names
    assert made[0].names["tensors"].startswith("unidentified ")
    assert weights_differ(made[0].names, made[1].names)
    assert "cannot be told from others" in caplog.text


def test_what_cannot_be_looked_at_is_another_after_each_reset():
    weights = LoadedWeights("1", [], alone)
    assert weights.names == {"files": "1"}
    names = set()
    for _ in range(3):
        assert weights.check()
        names.add(weights.text)
    assert len(names) == 3


def test_the_models_are_those_of_the_runner_that_registers(tmp_path, monkeypatch):
    monkeypatch.setattr("kvconnect.vllm.weights.all_ranks", alone)
    vllm_config = SimpleNamespace(speculative_config=None)
    vllm_config.model_config, vllm_config.load_config = config(tmp_path, "s3://bucket/x")
    models = [network(0), network(1)]
    names = []
    for model in models:
        names.append(Runner(model).initialize_kv_cache(vllm_config).names)
    assert names == [LoadedWeights(None, [model], alone).names for model in models]
