"""Tables that cast values between the dtype of a cache and the dtype on the wire.

A cast of at most 16 bits is one look-up. These rules bind every kernel:

    to float8_e4m3fn:   x / scale, in float32, then the nearest value, ties to even, held within +-448
    from float8_e4m3fn: value * scale, in float32, then the nearest value, ties to even
    bfloat16, float16:  the nearest value, ties to even; infinite where it is out of range

A NaN stays a NaN, and always has the same bits: 0x7f, 0x7fc0 or 0x7e00.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from kvconnect.plan.wire import ITEM_BYTES, SCALED

NAN_BITS = {"float8_e4m3fn": 0x7F, "bfloat16": 0x7FC0, "float16": 0x7E00}

_INTS = {1: torch.int8, 2: torch.int16}
_LARGEST = 448.0
_MOST_TABLES = 512


@dataclass(frozen=True)
class Cast:
    """The dtype of a side's values in memory, and the dtype on the wire, which is never wider."""

    memory: str
    wire: str

    @property
    def memory_bytes(self) -> int:
        return ITEM_BYTES[self.memory]

    @property
    def wire_bytes(self) -> int:
        return ITEM_BYTES[self.wire]

    @property
    def widening(self) -> int:
        """Bytes in memory per byte on the wire: 1 or 2."""
        return self.memory_bytes // self.wire_bytes


@functools.lru_cache(maxsize=_MOST_TABLES)
def cast_table(source: str, target: str, scale: float) -> NDArray[Any]:
    """Bits of values in dtype ``target`` by their bits in ``source``: uint8 or uint16, one per pattern."""
    item = ITEM_BYTES[source]
    bits = torch.arange(-(1 << 8 * item - 1), 1 << 8 * item - 1, dtype=_INTS[item]).roll(1 << 8 * item - 1)
    values = bits.view(getattr(torch, source)).float()
    factor = torch.tensor(scale, dtype=torch.float32)
    if target == SCALED:
        # Some versions of torch convert values out of range to NaN.
        values = (values / factor).clamp(-_LARGEST, _LARGEST)
    elif source == SCALED:
        values = values * factor
    item = ITEM_BYTES[target]
    cast = values.to(getattr(torch, target)).view(_INTS[item])
    return cast.masked_fill(values.isnan(), NAN_BITS[target]).numpy().view(f"u{item}")
