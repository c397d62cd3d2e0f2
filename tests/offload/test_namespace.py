"""Whatever the bytes of a block depend on changes the namespace, and nothing else does."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor, PageAxes, Region, RegionTable
from kvconnect.cache.retention import Window
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, MLASpec, StateSpec
from kvconnect.errors import LocalError
from kvconnect.offload.namespace import Namespace, cache_facts, row_facts

SPECS = {
    "full": AttentionSpec(
        16, 2, 8, torch.bfloat16, head_size_v=4, page_size_padded=1024, stored_block_size=8
    ),
    "window": AttentionSpec(16, 2, 8, torch.float16, retention=Window(64)),
    "latent": MLASpec(16, 8, torch.bfloat16, stored_block_size=4, retention=Window(32)),
    "state": StateSpec(16, ((3, 4), (2, 2)), (torch.bfloat16, torch.float32), page_size_padded=4096),
}


def a_config(**changed):
    specs = {**SPECS, **changed}
    return KVCacheConfig(10, tuple(KVCacheGroup((name,), spec) for name, spec in specs.items()))


def a_table(num_blocks=10, order="block token head content"):
    spec = AttentionSpec(16, 2, 8, torch.bfloat16)
    config = KVCacheConfig(num_blocks, (KVCacheGroup(("layer",), spec),))
    sizes = {"block": num_blocks, "token": 16, "head": 2, "content": 16}
    tensor = torch.zeros([sizes[axis] for axis in order.split()], dtype=torch.bfloat16)
    return RegionTable.build(config, {0: 16}, {"layer": CacheTensor(tensor, order)})


def digest(config=None, table=None):
    facts = {"cache": cache_facts(config or a_config()), "rows": row_facts(table or a_table())}
    return Namespace.of(facts).digest


def changed_specs():
    for name, spec in SPECS.items():
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            if field.name in ("page_size_padded", "block_size"):
                continue
            if field.name == "shapes":
                others = [((4, 3), (2, 2)), ((3, 4), (2, 3))]
            elif field.name == "dtypes":
                others = [(torch.float32, torch.bfloat16)]
            elif isinstance(value, torch.dtype):
                others = [torch.float16 if value is torch.bfloat16 else torch.bfloat16]
            else:
                others = [
                    Window(7) if field.name == "retention" else value * 2 if value else 4,
                    *([None] if field.default is None else []),
                ]
            for other in others:
                if other != value:
                    yield pytest.param(name, {field.name: other}, id=f"{name}-{field.name}-{other}")


@pytest.mark.parametrize(("name", "change"), list(changed_specs()))
def test_every_field_of_a_spec_is_a_fact(name, change):
    spec = dataclasses.replace(SPECS[name], page_size_padded=None, **change)
    assert digest(a_config(**{name: spec})) != digest()


@pytest.mark.parametrize("name", SPECS)
def test_block_sizes_are_facts_where_blocks_hold_tokens(name):
    config = a_config(**{name: dataclasses.replace(SPECS[name], block_size=32)})
    assert (digest(config) == digest()) == (name == "state")


def test_how_many_tokens_a_state_may_cover_is_no_fact():
    def table(tokens):
        group = KVCacheGroup(("state",), StateSpec(tokens, ((4, 4),), (torch.float32,)))
        tensor = torch.zeros((10, 16), dtype=torch.float32)
        return RegionTable.build(
            KVCacheConfig(10, (group,)), {0: tokens}, {"state": CacheTensor(tensor, "block content")}
        )

    assert row_facts(table(4096)) == row_facts(table(8192))


def test_padding_and_the_number_of_blocks_are_none():
    padded = dataclasses.replace(SPECS["state"], page_size_padded=1 << 16)
    config = KVCacheConfig(777, a_config(state=padded).groups)
    assert digest(config, a_table(num_blocks=33)) == digest()


NO_FACTS = {"address", "num_blocks", "block_stride"}
REGION_CHANGES = {
    "layer": "other",
    "group": 1,
    "first_plane": 1,
    "heads": None,
    "dtype": "torch.float16",
    "address": 4096,
    "num_blocks": 11,
    "block_stride": 1 << 20,
    "page_bytes": 77,
    "axes": PageAxes(1, 1, 1, 1, 1, 1, 1),
    "scales": (2.0, 1.0),
    "key_bytes": 3,
}


def changed_tables():
    table = a_table(order="head block token content")
    region, group = table.regions[0], table.groups[0]
    for field in Region.__struct_fields__:
        other = msgspec.structs.replace(region, **{field: REGION_CHANGES[field]})
        yield field, field not in NO_FACTS, {"regions": (other, *table.regions[1:])}
    for field in PageAxes.__struct_fields__:
        axes = msgspec.structs.replace(region.axes, **{field: getattr(region.axes, field) + 1})
        other = msgspec.structs.replace(region, axes=axes)
        yield f"axes {field}", True, {"regions": (other, *table.regions[1:])}
    for field in ("group", "block_tokens", "blocks_per_kv_block", "retention"):
        value = "Window 7" if field == "retention" else getattr(group, field) + 1
        yield f"geometry {field}", True, {"groups": (msgspec.structs.replace(group, **{field: value}),)}
    yield "order of regions", True, {"regions": table.regions[::-1]}


@pytest.mark.parametrize(
    ("what", "is_fact", "change"), list(changed_tables()), ids=lambda value: str(value)[:30]
)
def test_of_a_table_all_is_a_fact_but_where_pages_are_and_how_many(what, is_fact, change):
    table = a_table(order="head block token content")
    assert len(table.regions) == 2
    other = msgspec.structs.replace(table, **change)
    assert (Namespace.of(row_facts(other)) != Namespace.of(row_facts(table))) == is_fact


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def typed(value):
    """A value that is equal to another only where type and content are: 1, 1.0 and true differ."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [typed(item) for item in value]
    return type(value).__name__, repr(value)


@given(st.dictionaries(st.text(max_size=3), values, max_size=3), st.dictionaries(st.text(max_size=3), values))
def test_namespaces_are_equal_where_facts_are(first, second):
    assert (Namespace.of(first) == Namespace.of(second)) == (typed(first) == typed(second))
    assert (Namespace.of(first).digest == Namespace.of(second).digest) == (typed(first) == typed(second))


@given(st.dictionaries(st.text(max_size=3), values, max_size=5))
def test_neither_order_nor_process_matters(given_facts):
    shuffled = dict(reversed(given_facts.items()))
    space = Namespace.of(given_facts)
    assert Namespace.of(shuffled) == space
    assert Namespace.of(json.loads(space.text)["facts"]) == space


def test_the_digest_of_known_facts_stays():
    """What is on disk is found by later versions, or their FORMAT_VERSION is another."""
    space = Namespace.of({"model": "a", "layers": [1, 2.5, None, True]})
    assert space.text == '{"facts":{"layers":[1,2.5,null,true],"model":"a"},"format":1}'
    assert space.name == space.digest.hex()[:32] == "182667ed75db365939f708d096146447"


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"a": {"b": b"x"}}, "Object of type bytes"),
        ({"a": [1, float("nan")]}, "not JSON compliant"),
        ({"a": "\ud800"}, r"can't encode character '\\ud800'"),
        ({"a": torch.float16}, "Object of type dtype"),
    ],
)
def test_what_is_no_fact_is_named(wrong, match):
    with pytest.raises(LocalError, match=match):
        Namespace.of(wrong)
