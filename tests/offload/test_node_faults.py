"""Copies that fail or take long, memory that is too small, and who leaves meanwhile: only cache is lost."""

from __future__ import annotations

import pytest

from kvconnect.errors import ConfigError
from tests.node.node_harness import make_client, make_prompt
from tests.offload.node_kit import ORACLES, Keeper, disk_settings, expected, make_keeper, wipe

PROMPT = make_prompt(300, seed=1)


class Ticket:
    """A copy that ends when, and how, a test says."""

    def __init__(self, *, done=True, error=None) -> None:
        self.done, self.error, self.waited_s = done, error, 0.0


def copier(keeper: Keeper):
    return keeper.engine.worker.offload._copier


@pytest.mark.parametrize("model", ["sliding", "hybrid"])
def test_a_restore_that_fails_is_computed_whatever_the_policy_for_peers(model):
    keeper = make_keeper(model=model)
    assert keeper.ask(PROMPT) == expected(PROMPT, model=model)
    wipe(keeper)
    asked = []
    copier(keeper).restore = lambda copies, after=None: asked.append(copies) or Ticket(error="cut")
    assert keeper.ask(PROMPT) == expected(PROMPT, model=model)
    assert keeper.cached == 0
    assert len(asked) == 1, "it is tried once"
    del copier(keeper).restore
    wipe(keeper)
    # What could not be restored is not trusted any more; it was kept anew by the request.
    assert keeper.ask(PROMPT) == expected(PROMPT, model=model)
    assert keeper.cached == 299 // ORACLES[model]().align * ORACLES[model]().align


def test_an_abort_while_blocks_are_restored_keeps_them_until_they_are_quiet():
    keeper = make_keeper()
    keeper.ask(PROMPT)
    wipe(keeper)
    held = []

    def restore(copies, after=None):
        held.append(Ticket(done=False))
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
    assert keeper.engine.snapshot["requests"]["aborted_while_loading"] == 1
    held[0].done = True
    keeper.settle()
    del copier(keeper).restore
    assert keeper.ask(PROMPT) == expected(PROMPT)
    assert keeper.cached == 288


def test_memory_without_room_for_any_hit_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cpu_bytes"):
        make_keeper(model="sliding", offload={"cpu_bytes": 4096, **disk_settings(tmp_path)})
    # The folder is free again.
    make_keeper(model="sliding", offload=disk_settings(tmp_path)).close()


def test_nothing_is_said_of_offload_where_there_is_none():
    client = make_client()
    assert client.engine.offload_state() is None
    assert client.engine.scheduler.hooks.offload is None
