"""Integer arithmetic whose rounding is stated by its name."""

from __future__ import annotations


def div_exact(dividend: int, divisor: int) -> int:
    """``dividend / divisor``. Raises ``ValueError`` where there is a remainder, which would be a bug."""
    quotient, remainder = divmod(dividend, divisor)
    if remainder:
        raise ValueError(f"{dividend} is not a multiple of {divisor}")
    return quotient


def div_ceil(dividend: int, divisor: int) -> int:
    """``dividend / divisor`` rounded up."""
    return -(-dividend // divisor)
