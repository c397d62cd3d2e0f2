"""Integer arithmetic whose rounding is said by its name."""

from __future__ import annotations


def div_exact(dividend: int, divisor: int) -> int:
    """``dividend / divisor`` where a remainder would be a bug.

    Raises:
        ValueError: if ``divisor`` does not divide ``dividend``.
    """
    quotient, remainder = divmod(dividend, divisor)
    if remainder:
        raise ValueError(f"{dividend} is not a multiple of {divisor}")
    return quotient


def div_ceil(dividend: int, divisor: int) -> int:
    """``dividend / divisor`` rounded up."""
    return -(-dividend // divisor)
