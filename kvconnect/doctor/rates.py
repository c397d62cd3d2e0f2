"""What was measured of a link, beside what the hardware should give. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvconnect.doctor.facts import Facts
from kvconnect.doctor.findings import Finding, warning, well
from kvconnect.doctor.hardware import active_ports

_LEAST_SHARE = 0.5
_NVLINK_BYTES_PER_S = 25e9
"""One link of any generation since Volta, each way."""
_SHARED = ("cma", "sysv", "posix", "xpmem", "memory")


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


def expected(facts: Facts, rates: Rates) -> tuple[float, str]:
    """What the lane should give in bytes a second, and why; 0 where that is not known."""
    trial, machine = facts.trials.get(facts.engine), facts.machine
    used = (trial.wire or trial.lane) if trial is not None else ""
    links = [int(link[2:]) for link in machine.links.values() if re.fullmatch(r"NV\d+", link)]
    if links and ("cuda_ipc" in used or "nvlink" in used):
        return max(links) * _NVLINK_BYTES_PER_S, f"NV{max(links)}"
    named = [port for port in active_ports(facts) if port.device in used] or active_ports(facts)
    if named and "tcp" not in used and not any(name in used for name in _SHARED):
        found = re.match(r"\d+", named[0].rate)
        return (float(found[0]) * 1e9 / 8 if found else 0.0), f"{named[0].device}, {named[0].rate}"
    interface = re.search(r"tcp/(\w+)", used)
    if interface and (speed := machine.speeds.get(interface[1])):
        return speed * 1e6 / 8, f"{interface[1]}, {speed} Mb/s"
    if any(name in used for name in _SHARED):
        return rates.copy, "a plain copy of memory"
    return 0.0, f"nothing known of {used or 'the lane'}"


def check_rates(facts: Facts, rates: Rates) -> Iterator[Finding]:
    """Whether bytes come as fast as they should."""
    should, why = expected(facts, rates)
    share = rates.contiguous / should if should else 1.0
    beside = f"{share:.0%} of {should / 1e9:.3g} ({why})" if should else f"beside {why}"
    found, figures = f"{rates.contiguous / 1e9:.3g} GB/s, {beside}", {"bytes_per_s": rates.contiguous}
    if share < _LEAST_SHARE:
        advice = "look at the rows above, at other traffic, and at where the processes run (NUMA)"
        yield warning("contiguous", found, advice, figures)
    else:
        yield well("contiguous", found, figures)
    if not rates.sent:
        yield warning("packed", "the peer has no slots, or only fetches", "ask a node that prefills", {})
        return
    found = (
        f"{rates.packed / 1e9:.3g} GB/s: the peer packs and sends at {rates.sent / 1e9:.3g}, here it is "
        f"unpacked at {rates.unpacked / 1e9:.3g}"
    )
    figures = {"bytes_per_s": rates.packed}
    if facts.machine.gpus and rates.packed < _LEAST_SHARE * rates.contiguous:
        yield warning(
            "packed", found, "larger slots (slot_bytes), or look at what else uses the GPUs", figures
        )
    else:
        yield well("packed", found, figures)
