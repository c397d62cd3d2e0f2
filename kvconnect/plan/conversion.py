"""Caches that keep the same values in another type: which types are converted, and what of it travels.

A cache of ``float8_e4m3fn`` keeps ``x / scale``, rounded to the nearest value, ties to even, and held
within +-448; reading it gives ``value * scale``. K and V of a layer have a scale each. Of the two types
the narrower one travels, so that the side with the wider one converts: with the other side's scales.
"""

from __future__ import annotations

import msgspec

from kvconnect.cache.region_table import UNSCALED, Scales

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""The types that are converted into each other, with the bytes of a value."""
SCALED = "float8_e4m3fn"
"""The one whose values stand for ``value * scale``."""


class Conversion(msgspec.Struct, frozen=True, array_like=True):
    """How the values of a layer differ from side to side.

    ``key_values`` of a head's values on the wire, from the first on, are K's. ``scales`` are those of the
    side that has any.
    """

    source_dtype: str
    target_dtype: str
    wire_dtype: str
    key_values: int
    scales: Scales

    def dtype_of(self, side: str) -> str:
        """The type on a side, which is ``"source"`` or ``"target"``."""
        return self.source_dtype if side == "source" else self.target_dtype


def is_convertible(source_dtype: str, target_dtype: str) -> bool:
    """Whether values of one type can be asked to become those of the other."""
    return source_dtype != target_dtype and {source_dtype, target_dtype} <= ITEM_BYTES.keys()


def make_conversion(
    source_dtype: str, target_dtype: str, source_side: tuple[Scales, int], target_side: tuple[Scales, int]
) -> Conversion:
    """The conversion of a layer; a side is its scales, and the bytes of a head that are K's.

    Of types that are equally wide the source's travels: the side that waits does the work.
    """
    narrower = ITEM_BYTES[target_dtype] < ITEM_BYTES[source_dtype]
    scales, key_bytes = target_side if target_dtype == SCALED else source_side
    if SCALED not in (source_dtype, target_dtype):
        scales, key_bytes = UNSCALED, 0
    return Conversion(
        source_dtype=source_dtype,
        target_dtype=target_dtype,
        wire_dtype=target_dtype if narrower else source_dtype,
        key_values=key_bytes // ITEM_BYTES[SCALED],
        scales=scales,
    )
