"""A kernel's words at absolute addresses."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from kvconnect.pack.move_triton import word_pointer  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit(do_not_specialize=["address"])
def _load_kernel(target, address, num_words, BYTES: tl.constexpr):
    lanes = tl.arange(0, 8)
    words = tl.load(word_pointer(address, BYTES) + lanes, mask=lanes < num_words, other=7)
    tl.store(target + lanes, words.to(tl.int64))


@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])
def test_words_of_every_size_are_read_from_where_they_lie(word_bytes):
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word_bytes]
    source = torch.arange(10, 18, device=DEVICE).to(dtype)
    target = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    _load_kernel[(1,)](target, source.data_ptr(), 6, BYTES=word_bytes)
    assert target.tolist() == [10, 11, 12, 13, 14, 15, 7, 7]


@pytest.mark.parametrize("address", [1 << 20, (1 << 31) + 64, (1 << 32) - 64, 1 << 33])
@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8])
def test_an_address_of_few_bits_is_one_too(word_bytes, address):
    target = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    _load_kernel[(1,)](target, address, 0, BYTES=word_bytes)
    assert target.tolist() == [7] * 8
