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


def checked_move(moves: Mapping[S, Sequence[S]], state: S, after: S, who: str) -> S:
    """The state ``after``, or an ``IllegalTransition`` that names ``who`` and both states."""
    if after not in moves[state]:
        raise IllegalTransition(f"{who}: {state.value}, so it cannot become: {after.value}")
    return after


class SlotState(enum.Enum):
    """Who may touch a slot."""

    FREE = "free"
    OURS = "used by our kernels"
    THEIRS = "in the hands of an engine or a peer"
    QUARANTINED = "it may still be touched"


SLOT_MOVES: Mapping[SlotState, Sequence[SlotState]] = {
    SlotState.FREE: (SlotState.OURS, SlotState.THEIRS),
    SlotState.OURS: (SlotState.THEIRS, SlotState.FREE),
    SlotState.THEIRS: (SlotState.OURS, SlotState.FREE, SlotState.QUARANTINED),
    SlotState.QUARANTINED: (SlotState.FREE,),
}


@dataclass(eq=False)
class Slot:
    """One slot. Each use has a new ``generation``; ``holder`` is the peer that the slot is taken for."""

    address: int
    length_bytes: int
    state: SlotState = SlotState.FREE
    generation: int = 0
    holder: str = ""


def _moved(slot: Slot, after: SlotState) -> SlotState:
    return checked_move(SLOT_MOVES, slot.state, after, f"slot of generation {slot.generation}")


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

    def take(self, state: SlotState, holder: str = "") -> Slot:
        """Take a free slot, to pack into or to grant, with a new generation. LocalError: none is free."""
        if not self._free:
            raise LocalError(f"all {len(self.slots)} slots are taken")
        # The slot that was used last: with a CPU, its memory is still in the processor's cache.
        slot = self._free[-1]
        slot.state = _moved(slot, state)
        self._free.pop()
        self.taken += 1
        slot.generation = self._next_generation
        self._next_generation += 1
        slot.holder = holder
        self._taken_for[holder] += 1
        return slot

    def move(self, slot: Slot, after: SlotState) -> None:
        """Change a slot's state, or raise ``IllegalTransition``. A slot that becomes free can be taken."""
        if slot.state is SlotState.FREE:
            # Moved, it could be taken again while it is used.
            raise IllegalTransition(
                f"slot of generation {slot.generation}: free, so it has to be taken first"
            )
        slot.state = _moved(slot, after)
        if after is SlotState.FREE:
            self._free.append(slot)
            self.taken -= 1
            self._taken_for[slot.holder] -= 1
            if not self._taken_for[slot.holder]:
                del self._taken_for[slot.holder]
