"""Nodes that keep blocks, in this process, and what an unbounded cache would find, by brute force."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import product, takewhile
from pathlib import Path

import msgspec
import torch

import tests.node.wide_model  # noqa: F401
from kvconnect.cache.retention import Full, State, Window
from kvconnect.offload.scheduler.hit_requirements import HitGroup
from tests.node.node_harness import Client, check_pool, make_client, plain_node
from tests.node.node_harness import answer_of as expected
from tests.offload.endless import Endless
from tests.offload.opened import closes_later

DEADLINE_S = 60.0
PLENTY_BYTES = 64 << 20
PATIENCE_S = 10.0
COMPUTES_PER_S = 500


class Keeper(Client):
    """A node whose steps are done by hand, and which waits where its loop would sleep."""

    def run(self, *names: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not all(self.last(name) for name in names):
            assert time.monotonic() < deadline, f"{names} did not end: {self.busy()}"
            self.step()

    def step(self) -> None:
        wait_s = self.engine.run_once()
        check_pool(self.engine.scheduler.manager.pool)
        if wait_s > 0:
            self.engine.sleep(min(wait_s, 0.02))

    def settle(self) -> None:
        """Steps until nothing is under way; then nothing may be left."""
        deadline = time.monotonic() + DEADLINE_S
        while any(self.busy().values()):
            assert time.monotonic() < deadline, self.busy()
            self.step()
        assert self.held == 0

    def busy(self) -> dict[str, int]:
        state = self.engine.offload_state()
        return {} if state is None else state["busy"]

    def ask(self, prompt: list[int], max_tokens: int = 8, params: dict | None = None) -> list[int]:
        """The tokens of one request, and its drafts, when all of it has been kept."""
        tokens = self.complete(prompt, max_tokens, params)
        self.settle()
        return tokens

    @property
    def cached(self) -> int:
        """Tokens of the last request that were not computed."""
        last = self.last(next(reversed(self.outputs)))
        assert last is not None
        return last.cached_tokens

    def close(self) -> None:
        self.engine.stop()


def patient(client: Keeper, learns: bool = False) -> Keeper:
    """The same, which waits for late answers, and takes what comes slowly unless it ``learns`` its own rate.

    Other tests use the machine.
    """
    pulls = client.engine.scheduler.hooks.pulls
    pulls._find_s = PATIENCE_S
    if not learns:
        pulls._rate.measured(COMPUTES_PER_S, 1.0)
        pulls._rate.measured = lambda num_tokens, seconds: None
    finds = client.engine.worker.transfer.decode.finds
    finds._config = msgspec.structs.replace(finds._config, find_s=PATIENCE_S)
    return client


def offload_config(role: str = "kv_both", engine: str = "none", extra: dict | None = None, **offload) -> str:
    """A connector's configuration that keeps blocks, in host memory if nothing else is said."""
    settings = {
        "engine": engine,
        "insecure": True,
        "offload": {"cpu_bytes": PLENTY_BYTES, "wait_s": 20.0, **offload},
        **(extra or {}),
    }
    return json.dumps({"kv_role": role, "kv_connector_extra_config": settings})


def disk_settings(folder: Path, **more) -> dict:
    return {"disk_path": str(folder), "disk_bytes": 64 << 20, **more}


def make_keeper(config: str | None = None, offload: dict | None = None, **options) -> Keeper:
    """A node that keeps blocks; its own prefix cache is off if nothing else is said."""
    options = {"enable_prefix_caching": False, **options}
    made = make_client(kv_transfer_config=config or offload_config(**(offload or {})), **options)
    made.engine.worker.on_results(made.engine.wake)
    keeper = Keeper(made.engine)
    closes_later(keeper)
    # What is on disk from before is known then.
    keeper.settle()
    return keeper


class Oracle(Endless):
    """What can be found of prompts whose predecessors were all kept.

    ``block_tokens`` is the block size of every group, ``windows`` those of sliding groups. Windows and states
    are kept at the ends of prompts and answers, every ``checkpoint`` tokens of a prompt, and where a prompt
    was found to leave an earlier one.
    """

    def __init__(
        self, block_tokens: int, windows: tuple[int, ...] = (), states: bool = False, checkpoint: int = 4096
    ) -> None:
        rules = [Full(), *map(Window, windows), *[State()] * states]
        groups = [HitGroup(index, block_tokens, rule) for index, rule in enumerate(rules)]
        super().__init__(groups, block_tokens, checkpoint)

    def add(self, prompt: list[int], answer: list[int], found: int = 0) -> None:
        """A request ended, of which ``found`` tokens were not computed, nor was its last one."""
        tokens, size = [*prompt, *answer][:-1], self.align
        shared = (
            self.key(self.groups[0], at, prompt) in self.kept for at in range((len(prompt) - 1) // size)
        )
        ends = self.boundaries(len(prompt)) | {len(tokens) // size * size}
        ends.add(size * sum(takewhile(bool, shared)))
        for group, at in product(self.groups, range(len(tokens) // size)):
            if group.is_whole or any(end > found and self.reads(group, at, end) for end in ends):
                self.kept.add(self.key(group, at, tokens))


ORACLES = {
    "gqa": lambda **more: Oracle(16, **more),
    "mla": lambda **more: Oracle(16, **more),
    "wide": lambda **more: Oracle(16, **more),
    "mixed": lambda **more: Oracle(128, **more),
    "sliding": lambda **more: Oracle(16, windows=(96,), **more),
    "hybrid": lambda **more: Oracle(32, states=True, **more),
}

# Room for one request of 400 tokens in each model's pool, and for little more.
POOLS = {"gqa": 34, "mla": 34, "wide": 34, "mixed": 7, "sliding": 84, "hybrid": 24}


def wipe(client: Client) -> None:
    """Put bytes of no use into the whole pool, whoever has the blocks."""
    for cached in client.engine.runner.cache.tensors.values():
        cached.tensor.view(torch.int8).fill_(0x55)


def expected_together(asked: Sequence[tuple[list[int], int]], model: str) -> list[list[int]]:
    """What is ``expected`` of many prompts, each with its number of tokens: in one batch, in fewer steps."""
    return plain_node(model=model).together([prompt for prompt, _ in asked], *(count for _, count in asked))


class Twin:
    """A node that keeps blocks, one that does not, and the oracle: every request is put to all three."""

    def __init__(
        self, model: str, keeper: Keeper | None = None, oracle: Oracle | None = None, **more
    ) -> None:
        self.model = model
        self.keeper = keeper or make_keeper(model=model, num_blocks=POOLS[model], **more)
        self.oracle = oracle or ORACLES[model]()

    def ask(self, prompt: list[int], max_tokens: int = 8) -> list[int]:
        """One request: its tokens are right, and as many were found as could be. Returns its answer."""
        tokens = self.keeper.ask(prompt, max_tokens)
        assert tokens == expected(prompt, max_tokens, model=self.model)
        found = self.keeper.cached
        assert found == self.oracle.hit(prompt)
        self.oracle.add(prompt, tokens[:max_tokens], found)
        return tokens[:max_tokens]

    def restart(self, make: Callable[[], Keeper]) -> None:
        """The node ends, and another goes on with what it has kept."""
        self.keeper.close()
        self.keeper = make()
