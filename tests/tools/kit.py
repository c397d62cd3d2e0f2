"""What the doctor says of a machine, in place of looks that a test replaces."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

from kvconnect.tools import doctor_runner as runner
from kvconnect.tools import facts
from kvconnect.tools.findings import Finding, Level
from kvconnect.tools.trial import Trial


def works(engine: str, host: str, *_: object) -> Trial:
    """An engine that starts."""
    return Trial(f"{engine} on {host}")


def finds(found: Any) -> Callable[..., Any]:
    """A look that finds this, whatever it is asked."""
    return lambda *_, **__: found


_LOOKS = {"engines": "available_engines", "trial": "run_trial", "port": "look_at_port", "machine": "look"}
QUICK = {"engines": {"nixl": "", "mooncake": "", "memory": ""}, "trial": works}
"""Everything is looked at but the libraries, which take seconds."""


def configured(role: str = "kv_both", **extra: object) -> str:
    """A configuration as an operator gives it to vLLM."""
    given = {"kv_connector": "KVConnect", "kv_role": role, "kv_connector_extra_config": extra}
    return json.dumps(given)


def found(
    configuration: str | None = None,
    *peers: str,
    measured: bool = False,
    **looks: Any,
) -> dict[str, Finding]:
    """What the doctor says, by what it is about; the worst of several. ``looks``: others, or results."""
    order = list(Level)
    looks = {
        _LOOKS.get(name, name): value if callable(value) else finds(value)
        for name, value in {**QUICK, **looks}.items()
    }
    with mock.patch.multiple(facts, **looks):
        said = runner.examine(configuration, peers, measured=measured)
    return {one.about: one for one in sorted(said, key=lambda one: order.index(one.level))}


def failures(said: dict[str, Finding]) -> dict[str, str]:
    """Every failure, with what to do."""
    wrong = {about: one for about, one in said.items() if one.level is Level.FAILURE}
    assert all(one.advice for one in wrong.values()), "a failure says what to do"
    return {about: f"{one.found} > {one.advice}" for about, one in wrong.items()}
