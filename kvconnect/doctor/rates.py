"""What was measured of a link, beside what the hardware should give. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvconnect.doctor.facts import Facts
from kvconnect.doctor.findings import Finding, warning, well
from kvconnect.engine.lanes import LEAST_SHARE, expected_rate, lane_of


@dataclass(frozen=True)
class Rates:
    """In bytes a second: the engine's with nothing beside it, that of packed chunks, and of unpacking them.

    ``copy`` is that of a plain copy within a process, and the most that shared memory gives.
    """

    contiguous: float
    sent: float
    unpacked: float
    copy: float

    @property
    def packed(self) -> float:
        """What a load would get: the slower side's."""
        return min(self.sent, self.unpacked)


def check_rates(facts: Facts, rates: Rates) -> Iterator[Finding]:
    """Whether bytes come as fast as they should."""
    trial = facts.trials.get(facts.engine)
    lane = lane_of((trial.wire or trial.lane) if trial is not None else "")
    should, why = expected_rate(facts.machine, lane, rates.copy)
    share = rates.contiguous / should if should else 1.0
    beside = f"{share:.0%} of {should / 1e9:.3g} ({why})" if should else f"beside {why}"
    found, figures = f"{rates.contiguous / 1e9:.3g} GB/s, {beside}", {"bytes_per_s": rates.contiguous}
    if share < LEAST_SHARE:
        advice = "look at the rows above, at other traffic, and at where the processes run (NUMA)"
        yield warning("contiguous", found, advice, figures)
    else:
        yield well("contiguous", found, figures=figures)
    if not rates.sent:
        yield warning("packed", "the peer has no slots, or only fetches", "ask a node that prefills")
        return
    found = (
        f"{rates.packed / 1e9:.3g} GB/s: the peer packs and sends at {rates.sent / 1e9:.3g}, here it is "
        f"unpacked at {rates.unpacked / 1e9:.3g}"
    )
    figures = {"bytes_per_s": rates.packed}
    if facts.machine.gpus and rates.packed < LEAST_SHARE * rates.contiguous:
        yield warning(
            "packed", found, "larger slots (slot_bytes), or look at what else uses the GPUs", figures
        )
    else:
        yield well("packed", found, figures=figures)
