"""Many requests at once in pools that are too small, some of them aborted: every token is right."""

from __future__ import annotations

import random

import pytest

from tests.node.node_harness import make_prompt
from tests.offload.node_kit import Keeper, disk_settings, expected_together, make_keeper

LONGEST = 300
# A little more than the longest request needs.
SMALL_POOLS = {"gqa": 36, "sliding": 88, "hybrid": 20, "mixed": 6}


class Soak:
    """Random requests that begin like earlier ones, and the tokens that a node without offload gives."""

    def __init__(self, keeper: Keeper, model: str, seed: int) -> None:
        self.keeper = keeper
        self.rng = random.Random(seed)
        self.model = model
        self.seen: list[list[int]] = []
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()

    def prompt(self) -> list[int]:
        rng = self.rng
        known = rng.choice(self.seen) if self.seen and rng.random() < 0.8 else []
        kept = known[: rng.randrange(len(known) + 1)] if rng.random() < 0.5 else known
        own = [rng.randrange(512) for _ in range(rng.randrange(1, 150 if not known else 60))]
        return [*kept, *own] if len(kept) + len(own) <= LONGEST else own

    def submit(self) -> None:
        name = f"r{len(self.asked)}"
        prompt, count = self.prompt(), self.rng.choice((1, 4, 9, 40))
        self.asked[name] = prompt, count
        self.seen.append(prompt)
        self.keeper.submit(name, prompt, count)

    def run(self, count: int) -> None:
        rng, keeper = self.rng, self.keeper
        while len(self.asked) < count:
            for _ in range(rng.randrange(1, 5)):
                self.submit()
            for _ in range(rng.randrange(12)):
                keeper.step()
            if rng.random() < 0.2:
                open_ones = [name for name in self.asked if keeper.last(name) is None]
                if open_ones:
                    name = rng.choice(open_ones)
                    self.aborted.add(name)
                    keeper.engine.abort(name)
        keeper.run(*self.asked)
        keeper.settle()

    def judge(self) -> int:
        """All tokens against the other node's. Returns how many tokens were found."""
        lasts = {name: self.keeper.last(name) for name in self.asked}
        assert not [(name, last.failure) for name, last in lasts.items() if last.failure is not None]
        ended = [name for name in self.asked if name not in self.aborted]
        wanted = expected_together([self.asked[name] for name in ended], self.model)
        for name, answer in zip(ended, wanted, strict=True):
            assert self.keeper.answer(name) == answer, name
        return sum(last.cached_tokens for last in lasts.values())


def soak(model: str, count: int, keeper: Keeper, seed: int = 0) -> tuple[Soak, int]:
    made = Soak(keeper, model, seed)
    made.run(count)
    return made, made.judge()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "count", "prefix_cache"),
    [
        pytest.param("gqa", 300, False, marks=pytest.mark.full),
        ("gqa", 60, True),
        ("sliding", 40, False),
        pytest.param("sliding", 100, True, marks=pytest.mark.full),
        ("hybrid", 40, False),
        ("mixed", 40, False),
    ],
)
def test_a_soak_leaves_nothing_and_changes_no_token(model, count, prefix_cache, tmp_path):
    keeper = make_keeper(
        model=model,
        num_blocks=SMALL_POOLS[model],
        max_num_batched_tokens=96,
        enable_prefix_caching=prefix_cache,
        offload={"cpu_bytes": 3 << 20, "checkpoint_tokens": 64, **disk_settings(tmp_path)},
    )
    made, found = soak(model, count, keeper)
    assert made.aborted
    assert found > 0


@pytest.mark.parametrize(("model", "num_blocks"), [("sliding", 60), ("hybrid", 18)])
def test_a_preempted_request_goes_on_from_what_was_kept_of_it(model, num_blocks):
    keeper = make_keeper(model=model, num_blocks=num_blocks)
    copier = keeper.engine.worker.offload._copier
    real, restored = copier.restore, []
    copier.restore = lambda copies, after=None: restored.append(copies) or real(copies, after)
    prompts = {"first": make_prompt(150, seed=1), "second": make_prompt(150, seed=2)}
    count = 120
    for name, prompt in prompts.items():
        keeper.submit(name, prompt, count)
    keeper.run(*prompts)
    keeper.settle()
    assert keeper.engine.snapshot["counts"]["preemptions"] > 0
    assert restored
    wanted = expected_together([(prompt, count) for prompt in prompts.values()], model)
    for name, answer in zip(prompts, wanted, strict=True):
        assert keeper.answer(name) == answer
        # Its client is told of its prompt as it was first admitted.
        assert keeper.last(name).cached_tokens == 0
