"""Dtype conversion between two caches: which types can be converted, and which type travels.

A ``float8_e4m3fn`` cache stores ``x / scale``, rounded to nearest, ties to even, and clamped to +-448;
a read gives ``value * scale``. K and V of a layer have one scale each. The narrower type travels, so
the side with the wider type converts, with the scales of the other side.
"""

from __future__ import annotations

import msgspec

from kvconnect.cache.region_table import UNSCALED, Scales

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""The types that can be converted into each other, with the bytes of a value."""
SCALED = "float8_e4m3fn"
"""The one of these types that has scales: a stored value stands for ``value * scale``."""


class Conversion(msgspec.Struct, frozen=True, array_like=True):
    """The dtypes of a layer on both sides and on the wire.

    The first ``key_values`` values of a head on the wire belong to K, the others to V. ``scales`` are the fp8
    side's, or ``UNSCALED`` if neither side is fp8.
    """

    source_dtype: str
    target_dtype: str
    wire_dtype: str
    key_values: int
    scales: Scales


def make_conversion(
    source_dtype: str, target_dtype: str, source_side: tuple[Scales, int], target_side: tuple[Scales, int]
) -> Conversion:
    """The conversion of a layer. A side is a pair: its scales, and the bytes of K in a head's row.

    Of two equally wide types the source's travels, so that the target, which waits for the bytes, converts.
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
