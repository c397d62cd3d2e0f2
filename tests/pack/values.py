"""Small floating-point numbers from their definition, one at a time: the reference for casts.

A type is its exponent and mantissa bits and whether it has infinities. Numbers and what lies midway between
two are exact in Python's floats, so that nothing here rounds but where it says so.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import struct

FORMATS = {"bfloat16": (8, 7, True), "float16": (5, 10, True), "float8_e4m3fn": (4, 3, False)}
ITEM = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
PAIRS = list(itertools.permutations(ITEM, 2))


def magnitude(name: str, code: int) -> float:
    """What the bits below the sign stand for."""
    exponents, mantissas, infinities = FORMATS[name]
    exponent, mantissa = divmod(code, 1 << mantissas)
    if infinities and exponent == (1 << exponents) - 1:
        return math.nan if mantissa else math.inf
    if not infinities and code == (1 << exponents + mantissas) - 1:
        return math.nan
    lowest = 2 - (1 << exponents - 1) - mantissas
    return math.ldexp(mantissa + (min(exponent, 1) << mantissas), lowest + max(exponent - 1, 0))


@functools.cache
def finite(name: str) -> list[float]:
    """The numbers that are not negative, in order; the place of each is its code."""
    codes = range(1 << 8 * ITEM[name] - 1)
    return list(itertools.takewhile(math.isfinite, (magnitude(name, code) for code in codes)))


def nearest(values: list[float], size: float) -> int:
    """The place of the nearest value, of two equally near ones the even place; len(values) beyond all."""
    above = bisect.bisect_left(values, size)
    if above == 0:
        return 0
    high = values[above] if above < len(values) else 2 * values[-1] - values[-2]
    middle = (values[above - 1] + high) / 2
    return above if size > middle or (size == middle and above % 2 == 0) else above - 1


def float32(value: float) -> float:
    """The nearest float32. A quotient or product of two of them is rounded as if it had been exact."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf


def cast(source: str, target: str, code: int, scale: float) -> int:
    """The bits of a value of ``source`` as one of ``target``."""
    if source == target:
        return code
    sign_bit, rest = divmod(code, 1 << 8 * ITEM[source] - 1)
    made, has_sign = cast_magnitude(source, target, rest, scale)
    return made | (sign_bit << 8 * ITEM[target] - 1 if has_sign else 0)


@functools.lru_cache(maxsize=1 << 20)
def cast_magnitude(source: str, target: str, code: int, scale: float) -> tuple[int, bool]:
    """The same for the bits below the sign, and whether the sign is kept: that of a NaN is not."""
    size, exact = magnitude(source, code), float32(scale)
    if target == "float8_e4m3fn":
        size = float32(size / exact)
    elif source == "float8_e4m3fn":
        size = float32(size * exact)
    exponents, mantissas, infinities = FORMATS[target]
    if math.isnan(size):
        return ((1 << exponents) - 1 << mantissas) | (1 << mantissas - 1 if infinities else 7), False
    values = finite(target)
    place = nearest(values, size)
    return (place if infinities else min(place, len(values) - 1)), True


def cast_row(row: bytes, source: str, target: str, key_values: int, scales: tuple[float, float]) -> bytes:
    """The K and then the V of a head, value by value."""
    made = b""
    for index in range(len(row) // ITEM[source]):
        code = int.from_bytes(row[index * ITEM[source] : (index + 1) * ITEM[source]], "little")
        scale = scales[0] if index < key_values else scales[1]
        made += cast(source, target, code, scale).to_bytes(ITEM[target], "little")
    return made
