"""Ranks of P and ranks of D that divide layers and heads in different ways: every byte lands, and no other.

The whole product of topologies is long (``-m full``); outside of it every m to n of each axis meets once.
"""

from __future__ import annotations

import itertools
import random

import pytest
from msgspec.structs import replace

from kvconnect.cache.shard import Topology
from kvconnect.config import ExtraConfig
from kvconnect.peer.agreement import disagreement
from kvconnect.peer.messages import Fetch, Release
from tests.worker.keeping import KeepingRanks
from tests.worker.pair import Clock, FakeWorker, TappedNetwork
from tests.worker.ranks import Ranks
from tests.worker.shapes import Model, same_blocks
from tests.worker.test_packed_geometry import move

MODELS = {
    "full": Model({"full": 4}, heads=4),
    "latent": Model({"latent": 4}),
    "windows": Model({"full": 2, "window": 3}, heads=2),
    "hybrid": Model({"full": 2, "window": 1, "latent": 1, "state": 2}, heads=4),
}
PIPELINES = ((0,), (0, 2), (0, 1, 3))
TENSORS = (1, 2, 4)
BLOCKS = (16, 64)
CASES = [
    pytest.param(name, *case, id="-".join(map(str, (name, *case))))
    for name in MODELS
    for case in itertools.product(range(3), TENSORS, BLOCKS, range(3), TENSORS, BLOCKS)
]
SAMPLE = random.Random(11).sample(CASES, 40)


def check(name, path, prefill, decode, blocks):
    ranks = Ranks(
        MODELS[name],
        same_blocks(blocks[0], 16, layout="HND"),
        same_blocks(blocks[1], 16, reverse_groups=path == "packed"),
        prefill,
        decode,
        ExtraConfig(path=path, num_slots=2),
        slot_bytes=1 << 13,
    )
    move(ranks, num_tokens=130, known_tokens=50)
    ranks.settle()
    # Every rank of P is let go, also one that nobody fetches from.
    assert [worker.sent for worker in ranks.prefill] == [["a"]] * prefill.size
    ranks.assert_idle()
    return ranks


@pytest.mark.parametrize(("name", "p", "p_tp", "p_block", "d", "d_tp", "d_block"), SAMPLE)
def test_any_topology_to_any_other(name, p, p_tp, p_block, d, d_tp, d_block):
    check(name, "packed", Topology(p_tp, PIPELINES[p]), Topology(d_tp, PIPELINES[d]), (p_block, d_block))


@pytest.mark.full
@pytest.mark.parametrize(("name", "p", "p_tp", "p_block", "d", "d_tp", "d_block"), CASES)
def test_every_topology_to_every_other(name, p, p_tp, p_block, d, d_tp, d_block):
    check(name, "packed", Topology(p_tp, PIPELINES[p]), Topology(d_tp, PIPELINES[d]), (p_block, d_block))


@pytest.mark.parametrize("path", ["direct", "auto"])
@pytest.mark.parametrize(("prefill", "decode"), [((0, 2), (0,)), ((0,), (0, 3)), ((0, 2), (0, 1, 3))])
def test_page_to_page_each_rank_sends_only_its_layers(prefill, decode, path):
    name = "hybrid" if path == "auto" else "windows"
    check(name, path, Topology(2, prefill), Topology(2, decode), (16, 16))


def test_a_rank_without_layers_of_a_group_is_not_asked_for_it():
    # Layers 0, 2 are full and 1, 3, 4 are windows; the last rank of P has windows only.
    ranks = check("windows", "direct", Topology(1, (0, 3)), Topology(1), (16, 16))
    window = ranks.decode[0].cache.group_of("window")
    asked = [[blocks.group for blocks in fetch.groups] for fetch in ranks.network.heard(Fetch)]
    assert sorted(asked) == [[0, 1], [window]]


def test_a_rank_that_nobody_fetches_from_is_let_go():
    model = MODELS["latent"]
    ranks = Ranks(model, same_blocks(16), same_blocks(16), Topology(2, (0, 2)), Topology(1))
    move(ranks, num_tokens=40)
    ranks.settle()
    assert len(ranks.network.heard(Fetch)) == 2
    assert len(ranks.network.heard(Release)) == 2
    assert [worker.sent for worker in ranks.prefill] == [["a"]] * 4


def test_a_layer_that_its_rank_does_not_have_is_named():
    ranks = Ranks(MODELS["full"], same_blocks(16), same_blocks(16), Topology(1, (0, 2)))
    local = ranks.prefill[1].local
    table = local.introduction.table
    kept = tuple(region for region in table.regions if region.layer != "full.3")
    local.introduction = replace(local.introduction, table=replace(table, regions=kept))
    ranks.prefilled("a", 20)
    ranks.fetched("a", 20)
    ranks.run(1)
    assert "layer 'full.3': the source has none of the bytes" in ranks.decode[0].failed["a"]


def test_layers_without_numbers_are_not_divided_over_pipeline_ranks():
    network = TappedNetwork(Clock())
    workers = [FakeWorker("P", 9, network, ExtraConfig(), stages=stages) for stages in ((0, 1), (0,))]
    ours, theirs = (worker.local.introduction for worker in workers)
    assert disagreement(theirs, theirs) is None
    for pair in ((ours, theirs), (theirs, ours)):
        assert "layer 'layer0' has no number" in disagreement(*pair)


@pytest.mark.parametrize("stages", [(1,), (0, 9, 3), (0, 1 << 20)])
def test_a_peer_whose_ranks_cannot_be_is_refused_by_name(stages):
    ranks = Ranks(MODELS["full"], same_blocks(16), same_blocks(16))
    worker = ranks.prefill[0]
    meaning = worker.local.introduction.meaning
    worker.local.introduction = replace(worker.local.introduction, meaning=replace(meaning, stages=stages))
    ranks.prefilled("a", 20)
    ranks.fetched("a", 20)
    ranks.run(1)
    assert "is in no world of 1 tensor-parallel ranks" in ranks.decode[0].failed["a"]


@pytest.mark.parametrize(("prefill", "decode"), [((0, 2), (0,)), ((0,), (0, 2)), ((0, 2), (0, 2))])
@pytest.mark.parametrize("tensor", [1, 2])
def test_what_is_kept_by_name_comes_from_all_pipeline_ranks(prefill, decode, tensor):
    ranks = KeepingRanks(
        MODELS["full"],
        same_blocks(8),
        same_blocks(32),
        Topology(tensor, prefill),
        Topology(3 - tensor, decode),
        config=ExtraConfig(path="packed"),
    )
    truth = ranks.keep("a", 64)
    blocks = ranks.pull("a", 64)
    ranks.run_until_ended()
    assert not ranks.failed
    assert [worker.cache.differences(truth, blocks) for worker in ranks.decode] == [[]] * len(ranks.decode)
