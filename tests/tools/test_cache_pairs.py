"""What ``kvconnect doctor`` says of two caches is what two workers would do, counted here by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvconnect import cli
from kvconnect.cache.shard import Topology, partner_ranks
from kvconnect.cache.specs import div_ceil
from kvconnect.errors import ConfigError
from kvconnect.tools.cache_file import parse_cache
from kvconnect.tools.cache_pairs import check_nodes, exchange
from kvconnect.tools.findings import Level

ROOT = Path(__file__).parents[2]
EXAMPLES = [ROOT / "deploy" / "examples" / f"{side}.cache.json" for side in ("prefill", "decode")]
GQA = {"kind": "gqa", "num_layers": 3, "num_kv_heads": 4, "head_size": 8}
MLA = {"kind": "mla", "num_layers": 2, "head_size": 12}
STATE = {"kind": "state", "num_layers": 2, "state_bytes": 1000}
SLIDING = {"kind": "sliding", "num_layers": 2, "num_kv_heads": 4, "head_size": 8, "sliding_window": 40}


def cache(*layers, **outer):
    extra = {key: outer.pop(key) for key in ("engine", "slot_bytes", "convert_dtype") if key in outer}
    return parse_cache(
        {"layers": list(layers), "block_size": 16, **outer, "kv_connector_extra_config": extra}
    )


def findings(source, target, tokens):
    ranks = (side.ranks("nixl") for side in (source, target))
    return list(check_nodes(*ranks, tokens, convert=target.extra.convert_dtype))


def works(source, target, tokens):
    return all(one.level is Level.PASS for one in findings(source, target, tokens))


def cache_pairs(source, target, tokens):
    """What each rank of D fetches from its partners, by both ranks."""
    sources, targets = source.ranks("nixl"), target.ranks("nixl")
    sizes, heads = (Topology(target.tp_size), Topology(source.tp_size)), target.meaning.num_heads
    return {
        (partner, rank): exchange(sources[partner], targets[rank], tokens, convert=target.extra.convert_dtype)
        for rank in targets
        for partner in partner_ranks(rank, *sizes, heads)
    }


def doctor(*arguments):
    return CliRunner().invoke(cli.app, ["doctor", *map(str, arguments)])


def compared(folder, model, *options):
    """What the doctor says of a model by its own config."""
    path = folder / "config.json"
    path.write_text(json.dumps(model))
    return doctor(path, "--json", "--tokens", "256", *options)


# --- the numbers --------------------------------------------------------------------------------------


LAYOUTS = st.sampled_from(["nhd", "hnd"])
SIDES = st.fixed_dictionaries({"layout": LAYOUTS, "tp_size": st.integers(1, 6), "ratio": st.integers(1, 3)})


@settings(max_examples=60)
@given(SIDES, SIDES, st.integers(1, 300))
def test_every_target_rank_gets_each_of_its_heads_once_and_whole(source, target, tokens):
    sides = [
        cache(
            {**GQA, "layout": side["layout"]},
            MLA,
            tp_size=side["tp_size"],
            block_size=16 * side["ratio"],
            kernel_block_size=16,
        )
        for side in (source, target)
    ]
    found = cache_pairs(*sides, tokens)
    assert works(*sides, tokens)
    head_bytes = 3 * 2 * 8 * 2
    latent_bytes = 2 * 12 * 2
    for rank in range(target["tp_size"]):
        wanted = {head for head in range(4) if rank in owners(head, target["tp_size"])}
        pairs = [pair for (_, target_rank), pair in found.items() if target_rank == rank]
        got = [head for pair in pairs for head in range(pair.heads.start, pair.heads.stop)]
        assert sorted(got) == sorted(wanted)
        for pair in pairs:
            row_bytes = len(pair.heads) * head_bytes + latent_bytes
            # Whole kernel blocks, or in the order `rows`, whole rows.
            rows = tokens if pair.order == "rows" else div_ceil(tokens, 16) * 16
            assert rows * row_bytes <= pair.total_bytes <= rows * row_bytes + pair.chunks * 11 * 15


def owners(head, world):
    """The ranks that keep a head, by counting."""
    if world >= 4:
        return [rank for rank in range(world) if rank * 4 // world == head]
    return [rank for rank in range(world) if rank * 4 // world <= head < (rank + 1) * 4 // world]


HALF, NARROW = ({**GQA, "dtype": dtype} for dtype in ("bfloat16", "float8_e4m3fn"))


@pytest.mark.parametrize(
    ("layers", "outer", "tokens", "order", "total_bytes"),
    [
        ((GQA, GQA), {}, 16 * 64, "pages", 3 * 64 * 16 * 4 * 2 * 8 * 2),
        # Of a window: tokens 960 to 999 are seen, which blocks 60 to 62 hold.
        ((SLIDING, SLIDING), {}, 1000, "pages", 3 * 16 * 2 * (4 * 2 * 8 * 2)),
        ((STATE, STATE), {"tp_size": 2}, 1, "pages", 2 * 1008),
        ((STATE, STATE), {"tp_size": 2}, 1000, "pages", 2 * 1008),
        # The narrower type travels.
        ((HALF, NARROW), {"convert_dtype": True}, 100, "rows", pytest.approx(100 * 3 * 4 * 2 * 8, abs=64)),
    ],
)
def test_so_many_bytes_travel_between_two_ranks(layers, outer, tokens, order, total_bytes):
    pair, *_ = cache_pairs(*(cache(one, **outer) for one in layers), tokens).values()
    assert (pair.order, pair.total_bytes) == (order, total_bytes)


def test_a_request_is_cut_into_chunks_that_fit_a_slot():
    side = cache(GQA, slot_bytes=8192)
    (pair,) = cache_pairs(side, side, 1600).values()
    assert pair.chunks >= pair.total_bytes / 8192


def test_no_memory_is_touched():
    wide = cache({**STATE, "num_layers": 64, "state_bytes": 1 << 28})
    before = resident_bytes()
    (region, *_) = wide.table(0).regions
    assert region.page_bytes == 1 << 28
    assert resident_bytes() - before < 64 << 20


def test_a_cache_that_no_machine_has_is_one_line():
    with pytest.raises(ConfigError, match="layers 'gqa' have blocks of impossible sizes"):
        cache({**GQA, "num_kv_heads": 65536, "head_size": 65536}, block_size=65536).table(0)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


# --- why not ------------------------------------------------------------------------------------------

ON_P, ON_D = "on the prefill node", "on the decode node"


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ({"convert_dtype": True}, {}, f"by convert_dtype {ON_P}, none {ON_D}"),
        ({}, {"layers": [{**GQA, "num_kv_heads": 2}]}, f"number of KV heads is 4 {ON_P}, 2 {ON_D}"),
        ({}, {"layers": [{**GQA, "num_layers": 5}]}, "attention.gqa is kind gqa, num_layers 3, num_kv_heads"),
        ({}, {"layers": [GQA, MLA]}, f"attention.mla is none {ON_P}, kind mla"),
        ({"layers": [GQA, MLA]}, {}, "num_layers 2 on the prefill node, none on the decode node"),
        (
            {"layers": [STATE], "tp_size": 2},
            {"layers": [STATE], "tp_size": 1},
            f"ranks is 2 {ON_P}, 1 {ON_D} (--tensor-parallel-size)",
        ),
    ],
)
def test_workers_that_would_refuse_each_other_do_so_here(source, target, reason):
    sides = [cache(*side.pop("layers", [GQA]), **side) for side in (dict(source), dict(target))]
    wrong = [one.found for one in findings(*sides, 100) if one.level is Level.FAILURE]
    assert any(reason in found for found in wrong), wrong


@pytest.mark.parametrize(("source", "target"), [("auto", "nixl"), ("auto", "auto"), ("nixl", "mooncake")])
def test_an_engine_that_is_chosen_there_is_no_difference(source, target, tmp_path):
    for name, engine in (("p", source), ("d", target)):
        given = {"layers": [GQA], "block_size": 16, "kv_connector_extra_config": {"engine": engine}}
        (tmp_path / name).write_text(json.dumps(given))
    done = doctor(tmp_path / "p", tmp_path / "d", "--json")
    assert done.exit_code == (target == "mooncake")
    assert (f"engine is nixl {ON_P}, mooncake {ON_D}" in done.stdout) == (target == "mooncake")


def test_caches_that_do_not_fit_have_every_reason():
    sides = cache(GQA, MLA), cache({**GQA, "dtype": "float16"}, {**MLA, "head_size": 16})
    wrong = {one.about: one.found for one in findings(*sides, 100) if one.level is Level.FAILURE}
    assert list(wrong) == ["identity, cache dtype", "caches"]
    assert wrong["caches"] == (
        f"rank to rank 0 > 0: layers 'gqa.0' to 'gqa.2' (3): dtype is bfloat16 {ON_P}, float16 {ON_D}: set "
        "the same --kv-cache-dtype and --dtype on both, or convert_dtype: true; "
        f"layers 'mla.0' to 'mla.1' (2): a head and token have 24 bytes {ON_P}, 32 bytes {ON_D}: serve the "
        "same model, with the same attention backend"
    )


# --- what is wrong with a file ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"layers": [], "block_size": 16}, "layers is empty"),
        (
            {"layers": [GQA], "block_size": 16, "tp_sise": 2},
            "cache has no key 'tp_sise' (its value is 2); did you mean 'tp_size'?",
        ),
        ({"layers": [3], "block_size": 16}, "layers[0] is 3; accepted: an object"),
        (
            {"layers": [{**GQA, "kind": "rnn"}], "block_size": 16},
            "layers[0].kind is 'rnn'; accepted: gqa, mla, sliding, state",
        ),
        (
            {"layers": [GQA, {**MLA, "num_kv_heads": 8}], "block_size": 16},
            "layers[1] has no key 'num_kv_heads' (its value is 8); did you mean 'num_layers'? accepted",
        ),
        ({"layers": [GQA, GQA], "block_size": 16}, "layers[1].name is 'gqa', which layers[0] has too"),
        (
            {"layers": [GQA], "block_size": 16, "kernel_block_size": 32},
            "layers[0]: block_size is 16, but the attention kernels need blocks of 32 tokens",
        ),
        (
            {"layers": [GQA], "block_size": 16, "kv_connector_extra_config": {"path": "packed"}},
            "kv_connector_extra_config.path is 'packed', and is no setting any more",
        ),
    ],
)
def test_a_wrong_configuration_names_the_key_the_value_and_what_is_accepted(given, text):
    with pytest.raises(ConfigError) as caught:
        parse_cache(given)
    assert text in str(caught.value)


def test_kinds_of_layers_may_have_blocks_of_their_own():
    side = cache(GQA, {**MLA, "block_size": 64}, {**STATE, "block_size": 2048}, kernel_block_size=8)
    assert [kind.block_size for kind in side.layers] == [16, 64, 2048]
    assert [kind.kernel_block_size for kind in side.layers[:2]] == [8, 64]


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    given = tmp_path / "cache.json"
    given.write_text("[1]")
    for path, reason in (
        (given, "it holds list; accepted: a JSON object"),
        ("nowhere", "it cannot be read: No"),
    ):
        error = doctor(path).exception
        assert isinstance(error, ConfigError)
        assert str(error).startswith(f"{path}: {reason}")


def test_tokens_have_bounds():
    assert [doctor(*EXAMPLES, "--tokens", tokens).exit_code for tokens in (0, 2**20 + 1)] == [2, 2]


# --- the command, with the examples that come with it -------------------------------------------------


def pairs_of(report):
    """The findings about pairs of ranks, without those about what was compared."""
    assert report["findings"][0]["about"] == "taken for"
    return [one for one in report["findings"] if one["about"] == "caches"]


def test_what_a_comparison_takes_the_caches_for_is_stated(tmp_path):
    model = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64}
    rows = {one["about"]: one["found"] for one in json.loads(compared(tmp_path, model).output)["findings"]}
    assert rows["identity, attention"] == "the same on both: gqa kind gqa, num_layers 4, num_kv_heads 8"
    assert rows["identity, layout"] == "the same on both: gqa dtype bfloat16, layout nhd"
    sizes = ("--block-size", "16", "--block-size", "64")
    found = json.loads(compared(tmp_path, model, *sizes).output)["findings"]
    (blocks,) = [one["found"] for one in found if one["about"] == "identity, block size"]
    assert f"block_size 16, kernel_block_size 16 {ON_P}, block_size 64, kernel_block_size 64 {ON_D}" in blocks


def test_the_examples_are_compared_in_json_and_for_people():
    done = doctor(*EXAMPLES, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    mib = 8192 * 80 * 2 * 2 * 128 * 2 / 2**20
    assert found["works"] is True
    assert [one["found"].partition(" in ")[0] for one in pairs_of(found)] == [
        f"rank to rank {ranks}: they fit, and send heads {heads}, as rows: {mib:.1f} MiB"
        for ranks, heads in (("0 > 0", "0-1"), ("1 > 0", "2-3"), ("2 > 1", "4-5"), ("3 > 1", "6-7"))
    ]
    assert "heads 6-7, as rows" in " ".join(doctor(*EXAMPLES, "--tokens", 1000).stdout.split())


def test_what_cannot_be_is_said_and_is_exit_code_1(tmp_path):
    given = json.loads(EXAMPLES[1].read_text())
    given["layers"][0]["head_size"] = 64
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(given))
    done = doctor(EXAMPLES[0], wrong, "--json")
    (found,) = pairs_of(json.loads(done.stdout))
    assert (done.exit_code, found["level"]) == (1, "failure")
    said = "rank to rank 0 > 0, 1 > 0, 2 > 1, 3 > 1: layers 'gqa.0' to 'gqa.79' (80): a head and token have"
    assert found["found"].startswith(said)


@pytest.mark.parametrize(
    ("more", "heads"),
    [
        ({"num_key_value_heads": 2, "head_dim": 64}, "heads 1-1, as"),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
            "heads 6-7, as",
        ),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "as"),
        ({"sliding_window": 64, "use_sliding_window": False}, "heads 6-7, as"),
    ],
)
def test_a_models_own_config_is_enough(tmp_path, more, heads):
    model = {"model_type": "m", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512, **more}
    for config in (model, {"model_type": "wrapped", "text_config": model}):
        result = compared(tmp_path, config, "--tp", "2", "--tp", "4", "--block-size", "32")
        assert result.exit_code == 0, result.output
        *_, last = json.loads(result.output)["findings"]
        assert "> 3: they fit" in last["found"]
        assert f"send {heads} " in last["found"]


def test_a_model_that_keeps_what_its_config_does_not_say_is_refused_by_name(tmp_path):
    model = {"model_type": "m", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    for more, match in (
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types has 'linear_attention'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
    ):
        result = compared(tmp_path, {**model, **more})
        assert isinstance(result.exception, ConfigError)
        assert match in str(result.exception)


def test_a_nodes_own_configuration_may_have_slots_that_are_too_small(tmp_path):
    model = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 2048}
    given = {"kv_connector": "KVConnect", "kv_role": "kv_both"}
    for extra, fits, reasons in (
        ({}, True, []),
        ({"slot_bytes": 4096}, False, ["a slot has 4096 bytes, but layer 'gqa.0' needs at least"]),
    ):
        configuration = json.dumps({**given, "kv_connector_extra_config": extra})
        result = compared(tmp_path, model, "--tp", "2", "--kv-transfer-config", configuration)
        said = json.loads(result.output)
        assert (result.exit_code, said["works"]) == (not fits, fits)
        assert all(reason in pairs_of(said)[0]["found"] for reason in reasons)
