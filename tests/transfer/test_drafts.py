"""A draft model on one side only, or another one on each: its layers are left out, and all others land."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvconnect.cache.shard import layer_number
from tests.identities import named
from tests.transfer.ranks import Ranks
from tests.transfer.shapes import Model, same_blocks

# A draft that shares a group with the model's layers, one beside windows, and one with a group of its own.
CASES = [({"full": 4}, 3), ({"full": 2, "window": 3}, 4), ({"full": 1, "window": 2}, 1)]


def introduce(worker, weights: str, first: int) -> None:
    """The worker runs these weights; without a draft it has no layers from ``first`` on."""
    ours, (model, has_draft, draft) = worker.local.introduction, weights.partition(", draft ")
    identity = named("m", model, **({"draft": draft} if has_draft else {}))
    meaning = replace(ours.meaning, identity=identity, draft_from=first if has_draft else 0)
    kept = tuple(one for one in ours.table.regions if has_draft or layer_number(one.layer) < first)
    worker.introduce(meaning=meaning, table=replace(ours.table, regions=kept))


def handed_over(layers, first, weights):
    """What of D's layers is not P's afterwards, and what of its draft's was written."""
    ranks = Ranks(Model(layers, heads=2), same_blocks(16), same_blocks(16))
    for worker, given in zip((*ranks.prefill, *ranks.decode), weights, strict=True):
        introduce(worker, given, first)
    truth, blocks = ranks.prefilled("a", 60), ranks.fetched("a", 60)
    cache = ranks.decode[0].cache
    drafts = [name for name in cache.tensors if layer_number(name) >= first]
    before = {name: cache.bytes_of(name).copy() for name in drafts}
    ranks.run_until_received(1)
    assert ranks.decode[0].failed == {}
    differing = {text.split(":")[0] for text in cache.differences(truth, blocks)}
    written = {name for name in drafts if (cache.bytes_of(name) != before[name]).any()}
    ranks.settle()
    ranks.assert_idle()
    return differing, written, set(drafts)


@pytest.mark.parametrize(("layers", "first"), CASES)
@pytest.mark.parametrize("weights", [("w", "w, draft Y"), ("w, draft X", "w, draft Y")])
def test_the_layers_of_a_draft_that_p_does_not_run_are_left_out(layers, first, weights):
    differing, written, drafts = handed_over(layers, first, weights)
    assert (differing, written) == (drafts, set())


def test_the_layers_of_a_draft_on_both_sides_are_sent():
    differing, written, drafts = handed_over(*CASES[0], ("w, draft Y", "w, draft Y"))
    assert (differing, written) == (set(), drafts)


def test_a_draft_on_p_alone_is_no_matter():
    ranks = Ranks(Model({"full": 4}, heads=2), same_blocks(16), same_blocks(16))
    introduce(ranks.prefill[0], "w, draft X", 3)
    for worker in ranks.decode:
        meaning = worker.local.introduction.meaning
        worker.introduce(meaning=replace(meaning, identity=named("m", "w")))
    ranks.hand_over(60)


def test_other_weights_of_the_model_itself_are_refused_whatever_the_draft():
    ranks = Ranks(Model({"full": 4}, heads=2), same_blocks(16), same_blocks(16))
    introduce(ranks.prefill[0], "v, draft Y", 3)
    introduce(ranks.decode[0], "w, draft Y", 3)
    told = "peer has other weights: weights.files is v on the prefill node, w on the decode"
    assert told in ranks.refused()
