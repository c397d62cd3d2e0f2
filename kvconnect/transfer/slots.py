"""The slots of a worker: memory granted chunk by chunk, and the state of each: who may touch it.

One pool holds a worker's landing slots, which peers write, another its send slots, which the engine reads.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvconnect.errors import IllegalTransition, LocalError

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


def next_state(transitions: Mapping[tuple[S, E], S], state: S, event: E, who: str) -> S:
    """The state after an event, or an ``IllegalTransition`` that names ``who``, the state and the event."""
    after = transitions.get((state, event))
    if after is None:
        raise IllegalTransition(f"{who}: {state.value}, but {event.value}")
    return after


class SlotState(enum.Enum):
    """Who may touch a slot."""

    FREE = "free"
    OURS = "used by our kernels"
    THEIRS = "in the hands of an engine or a peer"
    QUARANTINED = "it may still be touched"


class SlotEvent(enum.Enum):
    """The events of a slot."""

    LEND = "it is granted to a peer"
    LANDED = "the peer reports that it wrote it"
    PACK = "our kernel begins to fill it"
    SUBMIT = "the engine is given it"
    RETURN = "it is quiescent"
    LOSE = "an engine or a peer may still touch it"


SLOT_TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.LEND): SlotState.THEIRS,
    (SlotState.THEIRS, SlotEvent.LANDED): SlotState.OURS,
    (SlotState.FREE, SlotEvent.PACK): SlotState.OURS,
    (SlotState.OURS, SlotEvent.SUBMIT): SlotState.THEIRS,
    (SlotState.OURS, SlotEvent.RETURN): SlotState.FREE,
    (SlotState.THEIRS, SlotEvent.RETURN): SlotState.FREE,
    (SlotState.THEIRS, SlotEvent.LOSE): SlotState.QUARANTINED,
    (SlotState.QUARANTINED, SlotEvent.RETURN): SlotState.FREE,
}


@dataclass(eq=False)
class Slot:
    """One slot. Each use has a new ``generation``; ``holder`` is the peer that the slot is taken for."""

    address: int
    length_bytes: int
    state: SlotState = SlotState.FREE
    generation: int = 0
    holder: str = ""


class SlotPool:
    """Slots of one size, in bytes.

    ``first_generation`` differs between processes, so that no process accepts a grant of another.
    """

    def __init__(self, addresses: Sequence[int], slot_bytes: int, first_generation: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots = tuple(Slot(address, slot_bytes) for address in addresses)
        self._free = list(reversed(self.slots))
        self._next_generation = first_generation
        self._taken_for: Counter[str] = Counter()
        self.taken = 0
        """The number of slots in use or in quarantine."""

    @property
    def free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def room_for(self, holder: str) -> int:
        """How many slots may be taken for one holder: all but one, where there are more than two."""
        most = len(self.slots) - 1 if len(self.slots) > 2 else len(self.slots)
        return min(len(self._free), most - self._taken_for[holder])

    def take(self, event: SlotEvent, holder: str = "") -> Slot:
        """Take a free slot, to grant or to pack into, with a new generation. LocalError: none is free."""
        if not self._free:
            raise LocalError(f"all {len(self.slots)} slots are taken")
        # The slot that was used last: with a CPU, its memory is still in the processor's cache.
        slot = self._free[-1]
        self.move(slot, event)
        self._free.pop()
        self.taken += 1
        slot.generation = self._next_generation
        self._next_generation += 1
        slot.holder = holder
        self._taken_for[holder] += 1
        return slot

    def move(self, slot: Slot, event: SlotEvent) -> None:
        """Change a slot's state, or raise ``IllegalTransition``. A slot that becomes free can be taken."""
        slot.state = next_state(SLOT_TRANSITIONS, slot.state, event, f"slot of generation {slot.generation}")
        if slot.state is SlotState.FREE:
            self._free.append(slot)
            self.taken -= 1
            self._taken_for[slot.holder] -= 1
            if not self._taken_for[slot.holder]:
                del self._taken_for[slot.holder]
