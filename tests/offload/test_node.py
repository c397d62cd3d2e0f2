"""A node that keeps blocks: prompts come back when its pool was overwritten, and every token is right."""

from __future__ import annotations

import pytest

from tests.node.node_harness import make_prompt
from tests.offload.node_kit import ORACLES, POOLS, Twin, disk_settings, make_keeper, wipe

MODELS = ("gqa", "mixed", "sliding", "hybrid")
ROOM_FOR_ONE = {"gqa": 22 << 15, "sliding": 72 << 14, "hybrid": 96 << 13, "mixed": 5 << 17}


def conversation(twin: Twin) -> None:
    """Prompts that come back as they were, longer, with a part of them alone, and with their answers."""
    first, second, third = (make_prompt(length, seed=length) for length in (300, 170, 33))
    answers = [twin.ask(first, 12), twin.ask(second, 60), twin.ask(third, 5)]
    for number in range(3):
        twin.ask(make_prompt(250, seed=1000 + number), 4)
    wipe(twin.keeper)
    twin.ask(first, 12)
    twin.ask(second, 60)
    twin.ask(third, 5)
    wipe(twin.keeper)
    twin.ask([*first, *make_prompt(40, seed=1)], 8)
    twin.ask([*first[:200], *make_prompt(60, seed=2)], 8)
    twin.ask(first[:257], 8)
    wipe(twin.keeper)
    # The next turn, and the one after it.
    turn = [*second, *answers[1], *make_prompt(21, seed=3)]
    answer = twin.ask(turn, 40)
    wipe(twin.keeper)
    twin.ask([*turn, *answer, *make_prompt(5, seed=4)], 8)
    twin.ask(turn, 40)


@pytest.mark.parametrize("model", MODELS)
def test_prompts_return_after_the_pool_was_overwritten(model):
    twin = Twin(model)
    conversation(twin)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("gqa", marks=pytest.mark.full),
        pytest.param("sliding", marks=pytest.mark.full),
        "hybrid",
    ],
)
def test_chunks_and_checkpoints_change_nothing(model):
    step = 64
    keeper = make_keeper(
        model=model,
        num_blocks=POOLS[model],
        max_num_batched_tokens=80,
        offload={"checkpoint_tokens": step},
    )
    twin = Twin(model, keeper, ORACLES[model](checkpoint=step))
    conversation(twin)


@pytest.mark.parametrize("model", MODELS)
def test_prompts_return_from_disk_when_the_node_was_restarted(model, tmp_path):
    def node(**more):
        return make_keeper(model=model, offload=disk_settings(tmp_path), **more)

    # Neither the number of blocks nor that of tokens is any of what was kept.
    def other_node():
        return node(num_blocks=POOLS[model] + 3, reserved_blocks=2, max_model_len=700)

    twin = Twin(model, node(num_blocks=POOLS[model]))
    first, second = make_prompt(300, seed=1), make_prompt(170, seed=2)
    answer = twin.ask(first, 40)
    twin.ask(second)
    twin.restart(other_node)
    twin.ask(first, 40)
    twin.restart(node)
    twin.ask([*first, *answer, *make_prompt(20, seed=3)])
    twin.ask([*second, *make_prompt(20, seed=3)])


@pytest.mark.parametrize("model", MODELS)
def test_disk_gives_back_what_memory_has_no_room_for(model, tmp_path):
    offload = {"cpu_bytes": ROOM_FOR_ONE[model], **disk_settings(tmp_path)}
    if model == "sliding":
        # A window needs a few rows, which is more than its share of so little.
        offload["shares"] = [0.4, 0.3, 0.3]
    twin = Twin(model, make_keeper(model=model, num_blocks=POOLS[model], offload=offload))
    prompts = [make_prompt(length, seed=length) for length in (300, 290, 170, 260)]
    for prompt in prompts * 2:
        twin.ask(prompt, 5)
    host = twin.keeper.engine.offload_state()["usage"]["host"]
    disk = twin.keeper.engine.offload_state()["usage"]["tiers"]["disk"]
    assert disk["records"] > sum(counts["ready"] for counts in host.values())
