"""Small floating-point numbers from their definition, one at a time: the reference for casts.

A type is its exponent and mantissa bits and whether it has infinities. Numbers are fractions, so that
nothing here rounds but where it says so.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import struct
from fractions import Fraction

FORMATS = {"bfloat16": (8, 7, True), "float16": (5, 10, True), "float8_e4m3fn": (4, 3, False)}
ITEM = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
PAIRS = list(itertools.permutations(ITEM, 2))
INFINITE, NAN = "infinite", "nan"


def magnitude(name: str, code: int) -> Fraction | str:
    """What the bits below the sign stand for."""
    exponents, mantissas, infinities = FORMATS[name]
    exponent, mantissa = divmod(code, 1 << mantissas)
    if infinities and exponent == (1 << exponents) - 1:
        return NAN if mantissa else INFINITE
    if not infinities and code == (1 << exponents + mantissas) - 1:
        return NAN
    lowest = 2 - (1 << exponents - 1) - mantissas
    if exponent == 0:
        return Fraction(mantissa) * Fraction(2) ** lowest
    return Fraction((1 << mantissas) + mantissa) * Fraction(2) ** (lowest + exponent - 1)


@functools.cache
def finite(name: str) -> list[Fraction]:
    """The numbers that are not negative, in order; the place of each is its code."""
    found = []
    for code in range(1 << 8 * ITEM[name] - 1):
        value = magnitude(name, code)
        if not isinstance(value, Fraction):
            return found
        found.append(value)
    return found


def nearest(values: list[Fraction], size: Fraction) -> int:
    """The place of the nearest value, of two equally near ones the even place; len(values) beyond all."""
    above = bisect.bisect_left(values, size)
    beyond = 2 * values[-1] - values[-2]
    if above == 0:
        return 0
    high = values[above] if above < len(values) else max(beyond, size)
    up, down = high - size, size - values[above - 1]
    return above if up < down or (up == down and above % 2 == 0) else above - 1


def float32(value: Fraction) -> Fraction | str:
    """The nearest float32."""
    if not value:
        return value
    # 24 bits of the number, or fewer where its last bit would be below 2**-149.
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= value < Fraction(2) ** exponent
    step = Fraction(2) ** max(exponent - 23, -149)
    rounded = Fraction(round(value / step)) * step
    return INFINITE if rounded >= Fraction(2) ** 128 else rounded


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
    size = magnitude(source, code)
    exact = Fraction(struct.unpack("<f", struct.pack("<f", scale))[0])
    if isinstance(size, Fraction) and target == "float8_e4m3fn":
        size = float32(size / exact)
    elif isinstance(size, Fraction) and source == "float8_e4m3fn":
        size = float32(size * exact)
    exponents, mantissas, infinities = FORMATS[target]
    values = finite(target)
    if size == NAN:
        return ((1 << exponents) - 1 << mantissas) | (1 << mantissas - 1 if infinities else 7), False
    place = len(values) if size == INFINITE else nearest(values, size)
    if place == len(values) and not infinities:
        place -= 1
    return place, True


def cast_row(row: bytes, source: str, target: str, key_values: int, scales: tuple[float, float]) -> bytes:
    """The K and then the V of a head, value by value."""
    made = b""
    for index in range(len(row) // ITEM[source]):
        code = int.from_bytes(row[index * ITEM[source] : (index + 1) * ITEM[source]], "little")
        scale = scales[0] if index < key_values else scales[1]
        made += cast(source, target, code, scale).to_bytes(ITEM[target], "little")
    return made
