"""A machine as the doctor finds it: files below a folder, and probes of which a test replaces one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvconnect.tools import doctor_runner as runner
from kvconnect.tools.facts import Probes
from kvconnect.tools.findings import Finding, Level
from kvconnect.tools.trial import Trial

RDMA = Trial("UCX mlx5_0:1", "rc_mlx5/mlx5_0:1", "")


def works(engine: str, host: str, *_: object) -> Trial:
    """An engine that starts."""
    return Trial(f"{engine} on {host}")


def finds(found: Any) -> Callable[..., Any]:
    """A probe that finds this, whatever it is asked."""
    return lambda *_, **__: found


QUICK = Probes(engines=finds({"nixl": "", "mooncake": "", "memory": ""}), trial=works)
"""Everything is looked at but the libraries, which take seconds."""


def configured(role: str = "kv_both", **extra: object) -> str:
    """A configuration as an operator gives it to vLLM."""
    given = {"kv_connector": "KVConnect", "kv_role": role, "kv_connector_extra_config": extra}
    return json.dumps(given)


def found(
    configuration: str | None = None,
    *,
    probes: Probes = QUICK,
    peers: tuple[str, ...] = (),
    measured: bool = False,
    **changes: Any,
) -> dict[str, Finding]:
    """What the doctor says, by what it is about; the worst of several.

    ``changes`` are other probes, or what a probe finds.
    """
    order = list(Level)
    changed = {name: value if callable(value) else finds(value) for name, value in changes.items()}
    said = runner.examine(configuration, replace(probes, **changed), peers, measured=measured)
    return {one.about: one for one in sorted(said, key=lambda one: order.index(one.level))}


def failures(said: dict[str, Finding]) -> dict[str, str]:
    """Every failure, with what to do."""
    wrong = {about: one for about, one in said.items() if one.level is Level.FAILURE}
    assert all(one.advice for one in wrong.values()), "a failure says what to do"
    return {about: f"{one.found} > {one.advice}" for about, one in wrong.items()}


def make_root(folder: Path, *, state: str = "4: ACTIVE") -> Path:
    """A machine with one RDMA device, whose processes have no rights of their own."""
    port = folder / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/status").write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    return folder
