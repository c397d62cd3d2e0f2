"""What is made of caches whose layers say that they keep fp8. Needs no vLLM: its layers are imitated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import LayoutError
from kvconnect.plan.wire import Conversion, align_wire
from kvconnect.vllm import values
from kvconnect.vllm.geometry import HeadCounts, worker_cache
from kvconnect.vllm.stated_identity import _cache_dtype, dtypes
from tests.vllm.specs import BLOCK, FULL, LATENT, LATENT_WINDOW, WINDOW, cache_config

HEADS, HEAD = 2, 8
NAME = "layers.0.attn"


class Layer:
    """An attention layer of vLLM's, as far as it is asked."""

    def __init__(self, backend: str = "FLASH_ATTN", k: float = 0.5, v: float = 2.0, **more: Any) -> None:
        self.kv_cache_dtype = "fp8"
        self.head_size = self.head_size_v = HEAD
        self._k_scale, self._v_scale = torch.tensor(k), torch.tensor(v)
        self._k_scale_float, self._v_scale_float = k, v
        self._backend = backend
        vars(self).update(more)

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self._backend)


@pytest.fixture(autouse=True)
def nvidia(monkeypatch):
    monkeypatch.setattr(values, "on_nvidia", lambda tensor: True)


def cards(
    dtype,
    layer=None,
    *,
    convert=True,
    spec=None,
    heads=HEADS,
    width=2 * HEAD,
    count: int | None = HEADS,
    world=1,
):
    """A worker's cache of one layer, and its card."""
    tensors = {NAME: torch.zeros(5, heads, BLOCK, width, dtype=dtype)}
    cache = worker_cache(
        cache_config(5, {NAME: spec or FULL}),
        tensors,
        tensor_rank=0,
        num_ranks=world,
        head_counts=HeadCounts(count),
        layers={} if layer is None else {NAME: layer},
        convert_dtype=convert,
    )
    table = RegionTable.build(
        cache.config, cache.kernel_block_sizes, cache.tensors, cache.heads, cache.scales
    )
    return cache, table


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"])
@pytest.mark.parametrize("spec", [FULL, WINDOW])
def test_bytes_become_values_with_their_scales_and_the_end_of_k(backend, spec):
    _, wide = cards(torch.bfloat16, Layer(backend, kv_cache_dtype="auto"), spec=spec)
    _, narrow = cards(torch.uint8, Layer(backend), spec=spec)
    for source, target in ((wide, narrow), (narrow, wide)):
        (stream,) = align_wire(source, target, convert=True).streams
        made = stream.conversion
        assert made is not None
        assert (made.wire_dtype, made.key_values, made.scales) == ("float8_e4m3fn", HEAD, (0.5, 2.0))


def test_k_and_v_may_be_of_unlike_widths():
    _, card = cards(torch.uint8, Layer("FLASH_ATTN_DIFFKV", head_size_v=3), width=HEAD + 3)
    assert (card.regions[0].key_bytes, card.regions[0].dtype) == (HEAD, "float8_e4m3fn")


@pytest.mark.parametrize("spec", [LATENT, LATENT_WINDOW])
def test_a_latent_row_has_the_scale_of_k(spec):
    layer = Layer("FLASHMLA", head_size=12)
    _, narrow = cards(torch.uint8, layer, spec=spec, heads=1, width=12, count=None)
    _, wide = cards(torch.float16, spec=spec, heads=1, width=12, count=None)
    (stream,) = align_wire(wide, narrow, convert=True).streams
    assert stream.conversion == Conversion("float16", "float8_e4m3fn", "float8_e4m3fn", 12, (0.5, 0.5))


UNKNOWN = {
    "no layer": None,
    "an indexer": SimpleNamespace(head_size=HEAD),
    "fp8_ds_mla": Layer("FLASHMLA_SPARSE", kv_cache_dtype="fp8_ds_mla"),
    "e5m2": Layer(kv_cache_dtype="fp8_e5m2"),
    "scales inside": Layer(kv_cache_dtype="fp8_per_token_head"),
    "a scale per head": Layer(_k_scale=torch.ones(HEADS)),
    "an unknown backend": Layer("ROCM_ATTN"),
    "rows that hold more": Layer(head_size=HEAD - 1),
    "another order than that of 16 bits": Layer("CPU_ATTN", 1.0, 1.0, isa="amx"),
    "K's end unknown": Layer("CPU_ATTN", 1.0, 2.0, isa="vec"),
}


@pytest.mark.parametrize("layer", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_what_is_not_known_stays_bytes(layer, dtype):
    _, wide = cards(torch.bfloat16)
    _, narrow = cards(dtype, layer)
    assert narrow.regions[0].dtype == "uint8"
    with pytest.raises(LayoutError, match="dtype is bfloat16 on the prefill node, uint8 on|it is stored as"):
        align_wire(wide, narrow, convert=True)
    assert align_wire(narrow, narrow, convert=True).order == "pages"


def test_on_amd_bytes_stay_bytes(monkeypatch):
    monkeypatch.setattr(values, "on_nvidia", lambda tensor: False)
    _, narrow = cards(torch.uint8, Layer())
    assert (narrow.regions[0].dtype, narrow.regions[0].scales) == ("uint8", (1.0, 1.0))


def test_where_k_is_transposed_a_row_is_all_of_a_block():
    layer = {bits: Layer("CPU_ATTN", 1.0, 1.0, isa="vec") for bits in (8, 16)}
    layer[16].kv_cache_dtype = "auto"
    _, narrow = cards(torch.uint8, layer[8])
    _, wide = cards(torch.bfloat16, layer[16])
    for card, item in ((narrow, 1), (wide, 2)):
        (region,) = card.regions
        assert (region.axes.tokens, region.axes.row_bytes) == (1, BLOCK * 2 * HEAD * item)
        assert region.page_bytes == HEADS * BLOCK * 2 * HEAD * item


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_unless_asked_for_nothing_is_described_otherwise(dtype):
    before, plain = cards(dtype, convert=False)
    after, card = cards(dtype, Layer("FLASH_ATTN", 1.0, 1.0), convert=False)
    assert after.tensors[NAME].tensor.dtype == before.tensors[NAME].tensor.dtype == dtype
    assert card.groups == plain.groups
    for ours, theirs in zip(plain.regions, card.regions, strict=True):
        assert (ours.dtype, ours.axes, ours.page_bytes) == (theirs.dtype, theirs.axes, theirs.page_bytes)
        assert (ours.heads, ours.scales) == (theirs.heads, theirs.scales)


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_rows_of_a_whole_block_are_divided_by_head_and_never_by_token(dtype, convert):
    _, card = cards(dtype, Layer("CPU_ATTN", 1.0, 1.0, isa="vec"), convert=convert)
    (region,) = card.regions
    assert (region.axes.heads, region.axes.tokens) == (HEADS, 1)
    assert region.heads is not None
    (stream,) = align_wire(card, card, "rows").streams
    assert stream.row_tokens == BLOCK


@pytest.mark.parametrize("convert", [False, True])
def test_unlike_scales_are_refused_with_and_without_conversion(convert):
    _, ours = cards(torch.uint8, Layer(k=0.5), convert=convert)
    _, theirs = cards(torch.uint8, Layer(k=0.25), convert=convert)
    with pytest.raises(LayoutError, match=r"scales of K and V are \(0.5, 2.0\) on the prefill node"):
        align_wire(ours, theirs, convert=convert)


@pytest.mark.parametrize("convert", [False, True])
def test_scales_that_no_row_can_have_do_not_keep_a_worker_from_starting(convert):
    cache, _ = cards(torch.uint8, Layer(), convert=convert, heads=1, count=8, world=2)
    assert cache.scales == {}
    assert cache.tensors[NAME].tensor.dtype == torch.uint8


# The fingerprint


def words(cache_dtype="auto", dtype=torch.bfloat16, *, convert=True, has_states=False):
    layer = SimpleNamespace(kv_cache_dtype=cache_dtype)
    kept = {"": _cache_dtype(layer, SimpleNamespace(dtype=dtype))}
    return dtypes(str(dtype).removeprefix("torch."), kept, has_states=has_states, convert_dtype=convert)


def test_types_that_are_converted_count_as_one():
    everything = [
        words(cache, dtype)
        for cache in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
        for dtype in (torch.bfloat16, torch.float16)
    ]
    assert all(
        one
        == {
            "dtype": "any of 16 and 8 bits, by convert_dtype",
            "cache dtype": "any of 16 and 8 bits, by convert_dtype",
        }
        for one in everything
    )
    assert words("fp8", convert=False) == {"dtype": "bfloat16", "cache dtype": {"": "fp8_e4m3"}}


def test_auto_is_the_type_that_it_stands_for():
    assert words("auto", convert=False) == words("bfloat16", convert=False) != words("fp8", convert=False)


def test_types_that_are_not_converted_are_told_apart():
    seen = [words(cache) for cache in ("auto", "fp8_e5m2", "fp8_ds_mla", "int8_per_token_head")]
    seen += [words("fp8_ds_mla", torch.float16), words("auto", torch.float32), words("fp8", torch.float32)]
    assert len(set(map(str, seen))) == len(seen)


def test_states_keep_the_type_of_the_model():
    ours, theirs = (words("auto", dtype, has_states=True) for dtype in (torch.bfloat16, torch.float16))
    assert ours != theirs
    assert words("fp8", has_states=True) == ours
