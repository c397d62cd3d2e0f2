"""What was measured of a link, beside what the hardware should give. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvconnect.doctor.facts import Facts
from kvconnect.doctor.findings import Finding, warning, warning_if
from kvconnect.engine.lanes import LEAST_SHARE, expected_rate, lane_of


@dataclass(frozen=True)
class Rates:
    """In bytes a second: the engine's with nothing beside it; of chunks that are packed and ``sent``; and of
    those that are unpacked too, ``packed``.

    ``copy`` is that of a plain copy within a process, and the most that shared memory gives.
    """

    contiguous: float
    sent: float
    packed: float
    copy: float


def check_rates(facts: Facts, rates: Rates) -> Iterator[Finding]:
    """Whether bytes come as fast as they should."""
    trial = facts.trials.get(facts.engine)
    lane = lane_of((trial.wire or trial.lane) if trial is not None else "")
    should, why = expected_rate(facts.machine, lane, rates.copy)
    share = rates.contiguous / should if should else 1.0
    beside = f"{share:.0%} of {should / 1e9:.3g} ({why})" if should else f"beside {why}"
    found, figures = f"{rates.contiguous / 1e9:.3g} GB/s, {beside}", {"bytes_per_s": rates.contiguous}
    advice = "look at the rows above, at other traffic, and at where the processes run (NUMA)"
    yield warning_if(share < LEAST_SHARE, "contiguous", found, advice, figures)
    found = f"{rates.packed / 1e9:.3g} GB/s unpacked here, of {rates.sent / 1e9:.3g} that the peer sends"
    if not rates.sent:
        yield warning("packed", "the peer has no slots, or only fetches", "ask a node that prefills")
        return
    slow = facts.machine.gpus and rates.packed < LEAST_SHARE * rates.contiguous
    advice = "larger slots (slot_bytes), or look at what else uses the GPUs"
    yield warning_if(slow, "packed", found, advice, {"bytes_per_s": rates.packed})
