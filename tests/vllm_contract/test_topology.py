"""How a worker of vLLM finds out which layers each rank of its server has."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch

from kvconnect.cache.shard import Topology
from kvconnect.errors import ConfigError
from kvconnect.vllm import geometry as topologies
from kvconnect.vllm import settings, weights
from kvconnect.vllm.geometry import scheduler_config
from tests.vllm.specs import FULL, STATE, WINDOW, cache_config, spec


def layers(*numbers: int) -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in numbers]


def found(monkeypatch, tensor: int, *stages: list[str]) -> list[Topology]:
    """What each rank finds; ``stages`` are the layers of each pipeline rank, ``tensor`` ranks have each."""
    ranks = [names for names in stages for _ in range(tensor)]
    firsts = [int(names[0].split(".")[2]) for names in ranks]
    given: list[int] = []
    monkeypatch.setattr(topologies, "all_ranks", lambda first: given.append(first) or firsts)
    parallel = SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=len(stages))
    config = SimpleNamespace(parallel_config=parallel)
    made = [topologies.topology(config, rank, names) for rank, names in enumerate(ranks)]
    assert given == (firsts if len(stages) > 1 else [])
    return made


def test_a_pipeline_rank_begins_with_the_first_layer_that_it_has(monkeypatch):
    assert found(monkeypatch, 2, layers(0, 1, 2)) == [Topology(2)] * 2
    stages = layers(0, 1), layers(2, 3, 4), [*layers(5, 6), "draft_model.layers.0.attn"]
    assert found(monkeypatch, 1, *stages) == [Topology(1, (0, 2, 5))] * 3
    assert found(monkeypatch, 2, *stages) == [Topology(2, (0, 2, 5))] * 6


def test_layers_that_do_not_follow_each_other_are_refused_by_name(monkeypatch):
    with pytest.raises(ConfigError, match=r"rank 0 has layer 'model.layers.2.self_attn.attn'.*\(0, 1\)"):
        found(monkeypatch, 1, layers(0, 2), layers(1, 3))


def turns(kept, offload=None, **parallel):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(),
        speculative_config=None,
        model_config=SimpleNamespace(use_mla="MLA" in type(kept).__name__, get_total_num_kv_heads=lambda: 8),
    )
    groups = cache_config(9, {"model.layers.0.self_attn.attn": kept})
    settings.refuse_unsupported(
        config, groups, SimpleNamespace(extra=SimpleNamespace(offload=offload, engine="none"))
    )
    return scheduler_config(groups, topologies.context_ranks(config)).groups[0].block_size


latent = functools.partial(spec, "MLAAttentionSpec", 64)


def test_a_block_of_ranks_that_take_turns_is_of_the_tokens_of_all():
    assert turns(latent(), decode_context_parallel_size=4) == 256
    assert turns(latent()) == 64
    spread = turns(latent(), decode_context_parallel_size=4, prefill_context_parallel_size=2)
    assert spread == 256, "of the ranks that take turns, however many have all"


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("tensor", "prefill"), [(1, 2), (2, 2), (4, 2), (2, 3)])
def test_prefill_context_ranks_are_numbered_as_they_take_turns(stages, tensor, prefill, monkeypatch):
    """Against the groups that vLLM makes (``initialize_model_parallel`` of vLLM 0.30 to 0.33)."""
    world = torch.arange(stages * prefill * tensor).reshape(stages, prefill, tensor)
    numbers = {}
    for stage, context, of_tensor in itertools.product(range(stages), range(prefill), range(tensor)):
        groups = [
            SimpleNamespace(world_size=size, rank_in_group=rank)
            for size, rank in ((stages, stage), (tensor, of_tensor), (prefill, context))
        ]
        monkeypatch.setattr(weights, "_rank_groups", lambda groups=groups: tuple(groups))
        numbers[int(world[stage, context, of_tensor])] = weights.own_rank()
    assert sorted(numbers.values()) == list(range(world.numel()))
    for decode in (1, prefill, tensor * prefill):
        groups = world.transpose(-1, -2) if decode > 1 else world
        for group in groups.reshape(-1, decode).tolist():
            parallel = SimpleNamespace(
                tensor_parallel_size=tensor,
                prefill_context_parallel_size=prefill,
                pipeline_parallel_size=1,
                decode_context_parallel_size=decode,
            )
            found = topologies.topology(SimpleNamespace(parallel_config=parallel), 0, layers(0, 1))
            ours = Topology(found.tensor, tuple(range(stages)), found.context)
            assert [ours.tokens(numbers[rank]).rank for rank in group] == list(range(decode))
            assert len({numbers[rank] // ours.tensor for rank in group}) == 1, "of one pipeline rank"


@pytest.mark.parametrize(
    ("kept", "more", "reason"),
    [
        (WINDOW, {}, "SlidingWindowSpec.*sees all tokens"),
        (STATE, {}, "cache group 0 has layers .*MambaSpec"),
        (latent(dcp_sharded=False), {}, "no draft model"),
        (latent(tokens_per_state=4), {}, "a row for each"),
        (latent(), {"offload": object()}, "is 2, with which .* no offload"),
        (FULL, {"prefill_context_parallel_size": 2}, "is 2 for .* KV heads"),
    ],
)
def test_what_ranks_do_not_keep_in_turns_is_refused(kept, more, reason):
    with pytest.raises(ConfigError, match=reason):
        turns(kept, decode_context_parallel_size=2, **more)
