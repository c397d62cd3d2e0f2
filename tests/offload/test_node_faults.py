"""Copies that fail or take long, memory that is too small, and who leaves meanwhile: only cache is lost."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from prometheus_client import REGISTRY

from kvconnect.errors import ConfigError
from tests.node.node_harness import make_client, make_prompt
from tests.offload.index_kit import check_index
from tests.offload.node_kit import ORACLES, POOLS, Keeper, disk_settings, make_keeper, wipe

PROMPT = make_prompt(300, seed=1)


class Ticket:
    """A copy that ends when, and how, a test says."""

    def __init__(self, real, *, done=True, error=None) -> None:
        self.real, self.done, self.error, self.waited_s = real, done, error, 0.0

    def wait(self) -> None:
        self.done = True


@contextmanager
def keeping(**options):
    keeper = make_keeper(**options)
    try:
        yield keeper
    finally:
        keeper.close()


def copier(keeper: Keeper):
    return keeper.engine.worker.offload._copier


def expected(prompt: list[int], model: str = "gqa", count: int = 8) -> list[int]:
    return make_client(model=model, enable_prefix_caching=False).complete(prompt, count)


@pytest.mark.parametrize("model", ["gqa", "sliding", "hybrid"])
def test_a_restore_that_fails_is_computed_whatever_the_policy_for_peers(model):
    with keeping(model=model) as keeper:
        assert keeper.ask(PROMPT) == expected(PROMPT, model)
        wipe(keeper)
        asked = []
        copier(keeper).restore = lambda copies, after=None: asked.append(copies) or Ticket(None, error="cut")
        assert keeper.ask(PROMPT) == expected(PROMPT, model)
        assert keeper.cached == 0
        assert len(asked) == 1, "it is tried once"
        del copier(keeper).restore
        wipe(keeper)
        # What could not be restored is not trusted any more; it was kept anew by the request.
        assert keeper.ask(PROMPT) == expected(PROMPT, model)
        assert keeper.cached == ORACLES[model]().block_tokens * (299 // ORACLES[model]().block_tokens)


def test_blocks_that_cannot_be_copied_are_not_found():
    with keeping() as keeper:
        copier(keeper).snapshot = lambda copies: Ticket(None, error="no memory")
        assert keeper.ask(PROMPT) == expected(PROMPT)
        del copier(keeper).snapshot
        wipe(keeper)
        assert keeper.ask(PROMPT) == expected(PROMPT)
        assert keeper.cached == 0
        wipe(keeper)
        assert keeper.ask(PROMPT) == expected(PROMPT)
        assert keeper.cached == 288


def test_an_abort_while_blocks_are_restored_keeps_them_until_they_are_quiet():
    with keeping() as keeper:
        keeper.ask(PROMPT)
        wipe(keeper)
        held = []

        def restore(copies, after=None):
            held.append(Ticket(None, done=False))
            return held[-1]

        copier(keeper).restore = restore
        keeper.submit("r", PROMPT)
        while not held:
            keeper.step()
        keeper.engine.abort("r")
        for _ in range(5):
            keeper.step()
        assert keeper.last("r").finish_reason == "abort"
        assert keeper.held == 19
        assert keeper.engine.snapshot.requests["aborted_while_loading"] == 1
        held[0].done = True
        keeper.settle()
        del copier(keeper).restore
        assert keeper.ask(PROMPT) == expected(PROMPT)
        assert keeper.cached == 288


def test_others_run_while_blocks_are_restored():
    with keeping() as keeper:
        keeper.ask(PROMPT)
        wipe(keeper)
        real, held = copier(keeper).restore, []

        def restore(copies, after=None):
            held.append(Ticket((copies, after), done=False))
            return held[-1]

        copier(keeper).restore = restore
        keeper.submit("restored", PROMPT)
        other = make_prompt(100, seed=2)
        keeper.submit("other", other)
        keeper.run("other")
        assert keeper.tokens("other") == expected(other)
        assert keeper.last("restored") is None
        real(*held[0].real).wait()
        held[0].done = True
        keeper.run("restored")
        assert keeper.tokens("restored") == expected(PROMPT)
        keeper.settle()


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=[] if model == "hybrid" else [pytest.mark.full]) for model in POOLS]
)
def test_memory_for_a_part_of_what_comes_by(model):
    """Eviction: less is found, never anything wrong."""
    room = {"gqa": 32, "mla": 24, "wide": 520, "mixed": 160, "sliding": 128, "hybrid": 200}[model]
    offload = {"cpu_bytes": room << 13}
    if model == "sliding":
        # A window needs a few rows, which is more than its share of so little.
        offload["shares"] = [0.5, 0.25, 0.25]
    with keeping(model=model, num_blocks=POOLS[model], offload=offload) as keeper:
        prompts = [make_prompt(length, seed=length) for length in (300, 140, 260, 180)]
        right = [expected(prompt, model) for prompt in prompts]
        found = 0
        for turn in range(3):
            for prompt, tokens in zip(prompts, right, strict=True):
                if turn == 2:
                    assert keeper.ask(prompt) == tokens
                assert keeper.ask(prompt) == tokens
                found += keeper.cached
                wipe(keeper)
        assert found > 0
        check_index(keeper.engine.scheduler.transfers.hooks.offload.host.index)


def test_memory_without_room_for_any_hit_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cpu_bytes"):
        make_keeper(model="sliding", offload={"cpu_bytes": 4096, **disk_settings(tmp_path)})
    # The folder is free again.
    make_keeper(model="sliding", offload=disk_settings(tmp_path)).close()


def test_what_is_found_and_lost_is_counted():
    def counted(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    with keeping() as keeper:
        before = counted("kvconnect_failures_total", reason="offload_restore_failed")
        keeper.ask(PROMPT)
        wipe(keeper)
        copier(keeper).restore = lambda copies, after=None: Ticket(None, error="cut")
        keeper.ask(PROMPT)
        assert counted("kvconnect_failures_total", reason="offload_restore_failed") == before + 1
        assert keeper.engine.snapshot.counts["cached_tokens"] == 0


def test_a_request_may_ask_that_little_of_it_is_kept():
    with keeping() as keeper:
        keeper.ask(PROMPT, params={"max_offload_tokens": 100})
        wipe(keeper)
        keeper.ask(PROMPT)
        assert keeper.cached == 96


def test_nothing_is_said_of_offload_where_there_is_none():
    client = make_client()
    assert client.engine.offload_state is None
    assert client.engine.scheduler.transfers.hooks.offload is None
