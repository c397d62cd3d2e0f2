"""vLLM's scheduler pauses, of which it has no hook: our connectors are informed, in a MultiConnector too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from kvconnect.vllm.pauses import follow_pauses


def connector(informed, name):
    return SimpleNamespace(_paused=lambda *, is_paused: informed.append((name, is_paused)))


@pytest.mark.parametrize("kind", ["ours", "several", "another's", "none"])
def test_the_state_in_which_vllm_waits_is_reported_and_no_other(kind):
    follow_pauses()
    follow_pauses()
    informed: list[tuple[str, bool]] = []
    scheduler = Scheduler.__new__(Scheduler)
    several = SimpleNamespace(_connectors=[connector(informed, "a"), object(), connector(informed, "b")])
    made = {"ours": connector(informed, "a"), "several": several, "another's": object(), "none": None}
    scheduler.connector = made[kind]
    names = {"ours": ["a"], "several": ["a", "b"]}.get(kind, [])
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL, PauseState.UNPAUSED):
        scheduler.set_pause_state(state)
        assert scheduler.pause_state is state
        assert informed == [(name, state is PauseState.PAUSED_NEW) for name in names]
        informed.clear()
