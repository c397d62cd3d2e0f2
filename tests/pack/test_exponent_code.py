"""The code of exponents: what each coder writes equals the code by hand, and is restored bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.pack.batches import PackTicket
from kvconnect.pack.exponent_code import ExponentCoder, coded_bytes
from tests.pack.sides import DEVICE

VALUES, APART = 4096, 96
TILE, CODED = 8192, 6256


def coder_of(kind, most_bytes):
    if kind == "numpy":
        return ExponentCoder(most_bytes)
    from kvconnect.pack.exponent_code_triton import TritonExponentCoder

    return TritonExponentCoder(most_bytes, torch.device(DEVICE))


def memory_beside(coder, values):
    """Memory of the coder's device with these bytes."""
    return torch.from_numpy(np.array(values, np.uint8)).to(coder._plain.device)


def bytes_of(memory):
    return memory.cpu().numpy().tobytes()


def by_hand(values):
    """The code of one tile's 16-bit numbers; None where it has none."""
    fields = [(value >> 15, value >> 7 & 255, value & 127) for value in values]
    largest = max(exponent for _, exponent, _ in fields)
    offsets, apart = [], {0: [], 1: []}
    for number, (_, exponent, _) in enumerate(fields):
        if exponent == 0:
            offsets.append(14)
        elif largest - exponent <= 13:
            offsets.append(largest - exponent)
        else:
            offsets.append(15)
            apart[number % 2].append(exponent)
    kept = apart[0] + apart[1]
    if len(kept) > APART:
        return None
    head = bytes(sign * 128 + mantissa for sign, _, mantissa in fields)
    nibbles = bytes(low + 16 * high for low, high in zip(offsets[::2], offsets[1::2], strict=True))
    return head + nibbles + bytes(kept).ljust(APART, b"\0") + bytes([largest]).ljust(16, b"\0")


@st.composite
def contents(draw):
    """16-bit numbers as KV has them: most of one scale, some zeros, some far smaller, some of any bits."""
    length_bytes = 4 * draw(st.integers(1, TILE // 2 + 1))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    count = -(-length_bytes // 2)
    floats = random.normal(size=count) * 2.0 ** draw(st.integers(-60, 60))
    floats[random.random(count) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0
    floats[random.random(count) < draw(st.sampled_from([0.0, 0.01, 0.05]))] *= 2.0**-30
    values = torch.from_numpy(floats).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    odd = random.random(count) < draw(st.sampled_from([0.0, 0.0, 0.003]))
    values[odd] = random.integers(0, 65536, odd.sum())
    return values.tobytes()


@pytest.mark.parametrize("kind", ["numpy", "triton"])
@given(content=contents())
def test_what_is_coded_equals_the_code_by_hand_and_is_restored(kind, content):
    coder, length = coder_of(kind, 3 * TILE), len(content)
    plain = coder._plain
    # What lay there before is part of no code.
    plain[:] = 0xA5
    plain[:length] = memory_beside(coder, list(content))
    slot = memory_beside(coder, [0x5A] * (coded_bytes(length) + 16))
    ticket = coder.encode(slot.data_ptr(), length, PackTicket(77))
    ticket.wait()
    coded = bytes_of(slot)
    filled = np.frombuffer(content.ljust(-(-length // TILE) * TILE, b"\0"), np.uint16).reshape(-1, VALUES)
    tiles = [by_hand(tile.tolist()) for tile in filled]
    assert ticket.done
    assert ticket.digest == 77
    assert ticket.has_failed == (None in tiles)
    for number, tile in enumerate(tiles):
        if tile is not None:
            assert coded[number * CODED : (number + 1) * CODED] == tile
    assert coded[-16:] == b"\x5a" * 16, "nothing is written behind the code"
    if ticket.has_failed:
        return
    plain[:] = 0xEE
    coder.decode(slot.data_ptr(), length)
    assert bytes_of(plain[:length]) == content


@pytest.mark.parametrize("kind", ["numpy", "triton"])
@pytest.mark.parametrize("length", [1, 2, 3, TILE - 1, TILE + 1])
def test_any_number_of_bytes_is_restored(kind, length):
    coder = coder_of(kind, 2 * TILE)
    plain, slot = coder._plain, memory_beside(coder, [0] * 2 * CODED)
    content = np.resize(np.array([0x3F80, 0xBF81, 0x4000], np.uint16), TILE).view(np.uint8)
    plain[:] = memory_beside(coder, content)
    coder.encode(slot.data_ptr(), length, PackTicket()).wait()
    plain[:] = 0
    coder.decode(slot.data_ptr(), length)
    assert bytes_of(plain[:length]) == content[:length].tobytes()


@pytest.mark.parametrize("kind", ["numpy", "triton"])
def test_bytes_that_are_no_code_are_decoded_to_some_value(kind):
    coder = coder_of(kind, 2 * TILE)
    slot = np.random.default_rng(5).integers(0, 256, 2 * CODED, dtype=np.uint8)
    slot[:CODED] = 0xFF
    memory = memory_beside(coder, slot)
    coder.decode(memory.data_ptr(), 2 * TILE)
    coder._finish()


class _Recording(ExponentCoder):
    _most_measured = 1 << 40

    def encode(self, slot, length_bytes, packed):
        self.lengths = [*getattr(self, "lengths", ()), length_bytes]
        return super().encode(slot, length_bytes, packed)


@given(tiles=st.integers(0, 40), rest=st.integers(0, TILE - 1))
def test_no_more_is_measured_than_a_slot_and_the_memory_beside_it_hold(tiles, rest):
    slot_bytes = tiles * TILE + rest
    coder, slot = _Recording(slot_bytes), np.zeros(slot_bytes + 1, np.uint8)
    coder.measure(slot.ctypes.data, slot_bytes)
    measured = {TILE * tiles} if tiles else set()
    assert set(getattr(coder, "lengths", ())) == measured
    assert all(coded_bytes(length) <= slot_bytes <= coder._plain.nbytes for length in measured)
    assert (coder.bytes_per_s > 0) == bool(tiles)


def test_coding_pays_where_a_link_is_slower_than_what_it_saves():
    coder = ExponentCoder(1 << 20)
    slot = np.zeros(1 << 20, np.uint8)
    assert not coder.pays_below(1.0), "its rate is not known"
    coder.measure(slot.ctypes.data, 1 << 20)
    # A GB over a link of L takes 1 / L, and coded 6256 / 8192 of that, and the time of coding.
    saved = 1 - CODED / TILE
    assert coder.pays_below(0.99 * saved * coder.bytes_per_s)
    assert not coder.pays_below(1.01 * saved * coder.bytes_per_s)
