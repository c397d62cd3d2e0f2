"""Words of memory that a kernel knows by absolute address."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def word_pointer(address, BYTES: tl.constexpr):
    """The words of so many bytes at these addresses: 8, 4, 2 or 1."""
    # An interpreter takes an address below 2**31 for 32 bits, against any annotation.
    address = address.to(tl.int64)
    if BYTES == 8:
        pointer = address.to(tl.pointer_type(tl.uint64))
    elif BYTES == 4:
        pointer = address.to(tl.pointer_type(tl.uint32))
    elif BYTES == 2:
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return pointer
