"""Memory for kernels' numbers: never lent twice at a time, used again, and given up beyond a bound."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.pack import numbers
from kvconnect.pack.numbers import NumberBuffer, NumberPool

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5000)), max_size=60))
def test_what_is_lent_is_nobody_elses(uses):
    found = NumberPool(CPU)
    lent: dict[int, tuple[NumberBuffer, int, int]] = {}
    for number, (name, count) in enumerate(uses):
        lent.pop(name, None)
        one = found.lend(count)
        assert len(one.values) >= count
        assert one.tensor.data_ptr() % 16 == 0
        one.values[:count] = number
        one.tensor[:count] = torch.from_numpy(one.values[:count])
        lent[name] = (one, count, number)
        for other, length, expected in lent.values():
            assert torch.equal(other.tensor[:length], torch.full((length,), expected))


def test_it_is_used_again():
    found = NumberPool(CPU)
    first = found.lend(700)
    address = first.tensor.data_ptr()
    assert found.lend(700).tensor.data_ptr() != address
    del first
    assert found.lend(1000).tensor.data_ptr() == address


def test_no_more_than_a_bound_is_kept(monkeypatch):
    monkeypatch.setattr(numbers, "_MOST_FREE_BYTES", 16 << 10)
    found = NumberPool(CPU)
    lent = [found.lend(1024) for _ in range(5)]
    addresses = {one.tensor.data_ptr() for one in lent}
    assert len(addresses) == 5
    lent.clear()
    assert found.free_bytes == 16 << 10
    assert np.sum([len(pairs) for pairs in found._free.values()]) == 2
    again = [found.lend(1024) for _ in range(2)]
    assert {one.tensor.data_ptr() for one in again} <= addresses
    assert found.free_bytes == 0
