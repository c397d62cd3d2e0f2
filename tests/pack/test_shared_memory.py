"""Memory that two processes map: one's writes are the other's bytes, and nothing else is ever mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvconnect.errors import PeerError
from kvconnect.pack import shared_memory
from kvconnect.pack.arena import Arena
from kvconnect.pack.shared_memory import MappedMemory, SharedMemory, SharedMemoryCard, this_machine

WRITER = """
import ctypes, sys, msgspec
from kvconnect.pack.shared_memory import MappedMemory, SharedMemoryCard, this_machine
card = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=SharedMemoryCard)
assert card.machine == this_machine()
mapped = MappedMemory(card)
ctypes.memmove(mapped.at(card.address + 100, 5), b"hello", 5)
"""


def test_another_process_writes_into_slots_of_this_one():
    arena = Arena("cpu", 4096, 3, 4096, shared=True)
    assert arena.card is not None
    given = msgspec.msgpack.encode(arena.card).hex()
    subprocess.run([sys.executable, "-c", WRITER, given], check=True, timeout=120)
    at = arena.card.address + 100 - arena._storage.data_ptr()
    assert bytes(arena._storage[at : at + 5].tolist()) == b"hello"


def test_every_slot_and_the_scratch_memory_lie_in_what_is_shared():
    arena = Arena("cpu", 8192, 3, 4096, shared=True)
    mapped = MappedMemory(arena.card)
    for address in arena.addresses:
        ctypes.memset(mapped.at(address, 8192), 7, 8192)
        assert set(arena.view(address, 8192).tolist()) == {7}
    assert mapped.copy_bytes_per_s(arena.addresses[0], arena.scratch_address, 4096) > 0
    assert set(arena.view(arena.scratch_address, 4096).tolist()) == {7}


@pytest.mark.parametrize(("first", "length"), [(-1, 1), (0, 4097), (4096, 1), (4095, 2), (0, -1), (-8, 4)])
def test_nothing_outside_of_it_has_a_place(first, length):
    shared = SharedMemory(4096)
    mapped = MappedMemory(shared.card)
    with pytest.raises(PeerError, match="the peer's slots are the 4096 bytes"):
        mapped.at(shared.card.address + first, length)
    assert mapped.at(shared.card.address + 4095, 1)


def test_it_outlives_its_owner_for_who_has_mapped_it():
    shared = SharedMemory(4096)
    mapped = MappedMemory(shared.card)
    card = shared.card
    del shared
    ctypes.memset(mapped.at(card.address, 4096), 1, 4096)
    with pytest.raises(PeerError):
        MappedMemory(card)


def test_it_is_unmapped_with_the_last_use():
    shared = SharedMemory(4096)
    mapped = MappedMemory(shared.card)
    begin = f"\n{mapped.at(shared.card.address, 1):x}-"
    assert begin in Path("/proc/self/maps").read_text(encoding="ascii")
    del mapped
    assert begin not in Path("/proc/self/maps").read_text(encoding="ascii")


def test_a_system_that_maps_nothing_is_an_error(monkeypatch):
    shared = SharedMemory(4096)
    monkeypatch.setattr(shared_memory, "_LIBC", SimpleNamespace(mmap=lambda *_: 2**64 - 1))
    with pytest.raises(PeerError, match="cannot be mapped"):
        MappedMemory(shared.card)


def card_of(descriptor: int, length_bytes: int = 4096, pid: int = 0) -> SharedMemoryCard:
    return SharedMemoryCard(this_machine(), pid or os.getpid(), descriptor, bytes(16), 4096, length_bytes)


def test_a_descriptor_that_is_something_else_is_not_even_opened():
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as plain, open("/dev/zero", "rb") as device:
        for descriptor in (plain.fileno(), reading, device.fileno()):
            with pytest.raises(PeerError, match="is no shared memory"):
                MappedMemory(card_of(descriptor))
    os.close(reading)
    os.close(writing)
    with pytest.raises(PeerError, match="cannot be mapped"):
        MappedMemory(card_of(1 << 20))
    with pytest.raises(PeerError, match="cannot be mapped"):
        MappedMemory(card_of(0, pid=2**31 - 1))


def test_memory_that_can_shrink_or_is_another_one_is_refused():
    descriptor = os.memfd_create("kvconnect", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096 + 16)
    with pytest.raises(PeerError, match="is not sealed memory of 4112 bytes"):
        MappedMemory(card_of(descriptor))
    os.close(descriptor)
    shared = SharedMemory(4096)
    with pytest.raises(PeerError, match="is not sealed memory of 8208 bytes"):
        MappedMemory(msgspec.structs.replace(shared.card, length_bytes=8192))
    with pytest.raises(PeerError, match="is memory of another process"):
        MappedMemory(msgspec.structs.replace(shared.card, nonce=bytes(16)))


def test_without_shared_memory_slots_are_plain_and_it_is_logged(monkeypatch, caplog):
    def fails(*_):
        raise OSError("none")

    monkeypatch.setattr(os, "memfd_create", fails)
    arena = Arena("cpu", 4096, 2, shared=True)
    assert arena.card is None
    assert "so the engine writes to them: none" in caplog.text
    assert arena.view(arena.addresses[1], 4096).numel() == 4096


def test_where_the_machine_is_not_known_it_is_nobodys(monkeypatch):
    monkeypatch.setattr(os, "readlink", lambda _: (_ for _ in ()).throw(OSError()))
    shared_memory.this_machine.cache_clear()
    assert this_machine() == ""
    shared_memory.this_machine.cache_clear()


def test_it_is_not_inherited_by_programs():
    shared = SharedMemory(mmap.PAGESIZE)
    assert not os.get_inheritable(shared.card.descriptor)
