"""What slots and staging may take of a GPU that a serving stack has already filled to its liking."""

from __future__ import annotations

import torch

from kvconnect.pack.arena import ALIGN_BYTES

LEAST_SLOTS = 4
LEAST_SLOT_BYTES = 16 << 20
_MARGIN_PART = 256
"""So much of a GPU is left free: kernels, links of the engine, and graphs larger than they were guessed."""


def spare_bytes(device: torch.device, reserved_bytes: int = 0) -> int | None:
    """What may be taken: what is free, less ``reserved_bytes`` that the serving stack is still to take.

    None where memory is not bounded like that.
    """
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return max(0, free_bytes - reserved_bytes - total_bytes // _MARGIN_PART)


def fitted_slots(slot_bytes: int, count: int, arenas: int, spare: int) -> tuple[int, int]:
    """Size and number of slots, of so many arenas and one more slot of scratch, that ``spare`` bytes hold.

    First there are fewer slots, then smaller ones. The least is returned even where it does not fit: whether
    it can be had, the device says.
    """
    spare -= arenas * ALIGN_BYTES
    least = min(count, LEAST_SLOTS)
    fitting = (spare // slot_bytes - 1) // arenas
    if fitting >= least:
        return slot_bytes, min(count, fitting)
    smaller = spare // (arenas * least + 1) // ALIGN_BYTES * ALIGN_BYTES
    return max(smaller, min(slot_bytes, LEAST_SLOT_BYTES)), least
