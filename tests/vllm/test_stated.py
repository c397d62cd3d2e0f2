"""Real vLLM engines whose KV means different things state so, entry by entry; those that look so agree."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from safetensors.torch import load_file, save_file
from transformers import Llama4TextConfig, Phi3Config

from kvconnect.cache.identity import Identity, differences, marks_differ
from kvconnect.peer.agreement import other_identity
from kvconnect.peer.messages import CacheMeaning
from tests.vllm.stated import Start, stated
from tests.vllm.tiny_models import Recipe, write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]
RECORDED = Path(__file__).parent / "stated_identities.json"


@dataclass(frozen=True)
class Other:
    """A start of a model that differs in ``entry`` from the one with flags ``than``, or in nothing."""

    model: str = "gqa"
    flags: tuple[str, ...] = ()
    entry: str = ""
    edit: str = ""
    isa: tuple[str, str] = ("", "")
    than: tuple[str, ...] = ()


def overrides(**fields) -> tuple[str, str]:
    return "--hf-overrides", json.dumps(fields)


BASE = {"rope_type": "default", "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8192}
TEMPERATURE = ("--override-generation-config", '{"attn_temperature_tuning": true}')
SHORT = ("--max-model-len", "256")
COUNTS = {
    "rope base": Other(flags=overrides(rope_parameters=BASE), entry="configuration"),
    "rope scaling": Other(flags=overrides(rope_parameters=YARN), entry="rotary"),
    "norm": Other(flags=overrides(rms_norm_eps=0.5), entry="configuration"),
    "config.json edited": Other(edit="config", entry="configuration"),
    "config.json of another folder": Other(flags=("--hf-config-path", "EDITED"), entry="configuration"),
    "ten rows of the embedding": Other(edit="embed_tokens", entry="weights"),
    "a projection": Other(edit="k_proj", entry="weights"),
    "dummy weights": Other(flags=("--load-format", "dummy"), entry="weights"),
    "model class": Other(flags=("--model-impl", "transformers"), entry="model"),
    "processor": Other(isa=("vec", "amx"), entry="page order"),
    "processor, fp8": Other("fp8", isa=("vec", "amx"), entry="page order"),
    "block size of CPU attention": Other(flags=("--block-size", "64"), entry="page order"),
    "cache type": Other(flags=("--kv-cache-dtype", "fp8"), entry="cache dtype"),
    "model type": Other(flags=("--dtype", "float16"), entry="dtype"),
    "quantization": Other(flags=("--quantization", "experts_int8"), entry="quantization"),
    "window size": Other("sliding", overrides(sliding_window=128), entry="attention"),
    "window off": Other("sliding", ("--disable-sliding-window", *SHORT), entry="attention", than=SHORT),
    "LongRoPE": Other("longrope", ("--max-model-len", "2048"), "rotary", than=("--max-model-len", "1024")),
    "temperature": Other("temperature", TEMPERATURE, entry="configuration"),
    "type of states": Other(
        "hybrid",
        ("--mamba-ssm-cache-dtype", "float32"),
        "states",
        than=("--mamba-ssm-cache-dtype", "bfloat16"),
    ),
}
FREE = {
    "type of the cache by name": Other(flags=("--kv-cache-dtype", "bfloat16")),
    "fp8 by its other name": Other("fp8", ("--kv-cache-dtype", "fp8_e4m3")),
    "another folder": Other(edit="nothing"),
    "batches": Other(flags=("--max-num-seqs", "3", "--max-num-batched-tokens", "777")),
    "length": Other(flags=("--max-model-len", "2000")),
    "seed and names": Other(flags=("--seed", "7", "--served-model-name", "x", "--skip-tokenizer-init")),
    "how blocks are named": Other(flags=("--prefix-caching-hash-algo", "sha256_cbor")),
    "prefix caching": Other(flags=("--no-enable-prefix-caching",)),
    "compiled": Other(flags=("--compilation-config", '{"mode": 0}')),
    "adapters enabled": Other(flags=("--enable-lora",)),
    "n-gram drafts": Other(
        flags=("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}')
    ),
    "LongRoPE, both short": Other("longrope", ("--max-model-len", "512"), than=("--max-model-len", "1024")),
}

_SHAPE = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "rope_theta": 1e4}
UNWRITTEN = {
    "longrope": Phi3Config(
        **_SHAPE,
        max_position_embeddings=4096,
        original_max_position_embeddings=1024,
        rope_parameters={**_LONG, "original_max_position_embeddings": 1024},
        architectures=["Phi3ForCausalLM"],
    ),
    "temperature": Llama4TextConfig(
        **_SHAPE,
        intermediate_size_mlp=256,
        head_dim=32,
        num_local_experts=2,
        attn_temperature_tuning=False,
        architectures=["Llama4ForCausalLM"],
    ),
}
"""Models whose weights do not matter here."""

NAMED = {"how blocks are named"}
"""What does not matter to a peer that is asked by handle, and gives blocks on disk other names."""


def write(model: str, folder: Path) -> Recipe:
    if model not in UNWRITTEN:
        return write_model(model, folder)
    recipe = write_model("gqa", folder)
    UNWRITTEN[model].save_pretrained(recipe.folder)
    return Recipe(model, recipe.folder, ("--load-format", "dummy"))


def edited(recipe: Recipe, folder: Path, edit: str) -> Path:
    """The same model in another folder, with a number changed of what is named."""
    shutil.copytree(recipe.folder, folder)
    if edit == "config":
        given = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**given, "rms_norm_eps": 0.25}))
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, tensor in weights.items():
        if f"{edit}.weight" in name:
            # Of an embedding every byte counts, other tensors are sampled.
            tensor[40 : 50 if edit == "embed_tokens" else None] += 1
    save_file(weights, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, tuple[Identity | str, Identity | str]]:
    """By case what both sides state, or their error; starts that are alike are made once."""
    root = tmp_path_factory.mktemp("stated")
    cases = {**COUNTS, **FREE}
    recipes = {model: write(model, root / model) for model in {case.model for case in cases.values()}}
    changed = str(edited(recipes["gqa"], root / "changed", "config"))
    pairs: dict[str, tuple[str, str]] = {}
    starts: dict[str, Start] = {}
    for name, case in cases.items():
        recipe, both = recipes[case.model], []
        for flags, isa, edit in ((case.than, case.isa[0], ""), (case.flags, case.isa[1], case.edit)):
            folder = str(edited(recipe, root / name, edit) if edit else recipe.folder)
            given = [flag.replace("EDITED", changed) for flag in (*recipe.options, *flags)]
            start = Start(folder, given, isa=isa)
            key = msgspec.json.encode(start).decode()
            starts[key] = start
            both.append(key)
        pairs[name] = both[0], both[1]
    made = stated(starts, root)
    return {name: (made[one], made[other]) for name, (one, other) in pairs.items()}


def both_of(found, case: str) -> tuple[Identity, Identity]:
    for one in found[case]:
        if isinstance(one, str):
            if "requires x86 with AVX-512 or AMX" in one:
                pytest.skip("vLLM's CPU build keeps no fp8 on this processor")
            raise AssertionError(one)
    return found[case]


@pytest.mark.full
@pytest.mark.parametrize("case", COUNTS)
def test_what_changes_bytes_is_refused_by_name_by_peers_and_not_found_on_disk(found, case):
    one, other = both_of(found, case)
    entry = COUNTS[case].entry
    for prefill, decode in ((one, other), (other, one)):
        refusal = other_identity(CacheMeaning(prefill, None, 1), CacheMeaning(decode, None, 1))
        assert refusal is not None
        assert any(text.startswith(entry) for text in differences(prefill, decode)), refusal
    # A process may get other weights: peers are asked for these, and a handle says nothing of them.
    assert (entry in marks_differ(one.marks, other.marks)) is (entry != "weights")
    assert one.facts != other.facts, "it has another namespace"


@pytest.mark.full
@pytest.mark.parametrize("case", FREE)
def test_what_changes_no_byte_is_no_difference(found, case):
    one, other = both_of(found, case)
    assert other_identity(CacheMeaning(one, None, 1), CacheMeaning(other, None, 1)) is None
    assert not marks_differ(one.marks, other.marks)
    assert (one.facts == other.facts) is (case not in NAMED)


def test_all_releases_of_vllm_state_the_same(tmp_path):
    """The two servers of a pair may run different ones. `KVCONNECT_RECORD=1` records what this one states."""
    recipes = {model: write(model, tmp_path / model) for model in ("gqa", "sliding", "hybrid", "longrope")}
    # By itself it depends on what the processor multiplies.
    more = {"hybrid": ["--mamba-ssm-cache-dtype", "float32"]}
    starts = {name: Start(str(it.folder), [*it.options, *more.get(name, ())]) for name, it in recipes.items()}
    found = stated(starts, tmp_path)
    # Weights are drawn anew, and a processor has an order of its own.
    own = {"weights": {}, "page order": {}}
    now = {name: one if isinstance(one, str) else one.replace(**own) for name, one in found.items()}
    if os.environ.get("KVCONNECT_RECORD"):
        RECORDED.write_bytes(msgspec.json.format(msgspec.json.encode(now), indent=1) + b"\n")
    recorded = msgspec.json.decode(RECORDED.read_bytes(), type=dict[str, Identity])
    for name, one in now.items():
        assert isinstance(one, Identity), one
        assert differences(recorded[name], one) == [], name
