"""Which way copies travel, by what was measured."""

from __future__ import annotations

import logging

import pytest

from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.row_parts import RowParts
from kvconnect.offload.copies.rows import RowLayout
from kvconnect.offload.copies.staging import Staging
from kvconnect.offload.copies.tiles import TileTable
from kvconnect.offload.copies.trial import Trial
from tests.offload.test_copies import plan_rows, two_groups

STAGING = Staging(1 << 20, 1 << 16, 1 << 16)


class Event:
    def __init__(self, at):
        self.at, self.done = at, True

    def wait(self):
        pass

    def seconds_since(self, earlier):
        return self.at - earlier.at


class Device:
    """A queue, and a kernel, on a clock of their own. Rates are bytes per second, out and back."""

    def __init__(self, arena, engines, kernel, full_programs):
        self.arena, self.engines, self.kernel, self.full_programs = arena, engines, kernel, full_programs
        self.now = 0.0
        self.copied = 0

    def run(self, launch):
        launch()

    def record(self, timed=False):
        return Event(self.now)

    def copy(self, source, target, length):
        out = STAGING.address <= int(source[0]) < STAGING.address + STAGING.out_bytes
        for host in target if out else source:
            assert self.arena.address <= host < self.arena.address + self.arena.length_bytes
        self.copied = int(length.sum())
        self.now += self.copied / self.engines[not out]

    def make_numbers(self, length):
        import numpy as np

        self.column = np.zeros(length, dtype=np.int64)
        return self

    def load(self, numbers, length):
        pass

    def start(self, numbers, launches, rows_at, to_rows, programs=0):
        part = min(1.0, programs / self.full_programs)
        self.now += self.copied / (self.kernel[not to_rows] * part)


def choose(engines, kernel, *, mode="auto", programs=0, full_programs=8, pinned=True):
    side = two_groups()
    layout = RowLayout.build(side.table)
    arena = RowArena(plan_rows(layout))
    arena.pinned = pinned
    device = Device(arena, engines, kernel, full_programs)
    parts = RowParts(layout, arena, STAGING.part_bytes)
    device.table = TileTable(parts.kinds)
    return Trial(parts, arena, STAGING, device, device).choose(mode, programs)


@pytest.mark.parametrize(
    ("engines", "kernel", "modes"),
    [
        ((50, 50), (50, 50), ("dma", "kernel")),
        ((50, 50), (57, 43), ("dma", "kernel")),
        ((50, 50), (58, 42), ("kernel", "dma")),
        ((50, 50), (10, 10), ("dma", "dma")),
        ((10, 10), (50, 50), ("kernel", "kernel")),
    ],
)
def test_the_way_follows_the_rates(engines, kernel, modes):
    ways = choose([rate * 1e9 for rate in engines], [rate * 1e9 for rate in kernel])
    assert tuple(way.mode for way in ways) == modes
    for way, engine, mover in zip(ways, engines, kernel, strict=True):
        assert way.bytes_per_s == pytest.approx(1e9 * (engine if way.mode == "dma" else mover))
        assert (way.programs > 0) == (way.mode == "kernel")


@pytest.mark.parametrize(("full", "taken"), [(4, 8), (8, 8), (12, 16), (16, 16), (20, 32), (64, 32)])
def test_a_kernel_has_no_more_programs_than_it_needs(full, taken):
    ways = choose((1e9, 1e9), (50e9, 50e9), full_programs=full)
    assert [way.programs for way in ways] == [taken, taken]
    ways = choose((1e9, 1e9), (50e9, 50e9), full_programs=full, programs=5)
    assert [way.programs for way in ways] == [5, 5]


def test_what_is_asked_for_is_taken():
    for mode in ("dma", "kernel"):
        for rates in ((50e9, 1e9), (1e9, 50e9)):
            assert [way.mode for way in choose(rates, rates[::-1], mode=mode)] == [mode, mode]


def test_memory_that_is_not_pinned_is_no_kernels():
    for mode in ("auto", "kernel"):
        ways = choose((1e9, 1e9), (50e9, 50e9), mode=mode, pinned=False)
        assert [(way.mode, way.programs) for way in ways] == [("dma", 0), ("dma", 0)]


def test_rates_are_said_once(caplog):
    caplog.set_level(logging.INFO)
    choose((54e9, 53e9), (44e9, 50e9))
    (record,) = caplog.records
    assert "leave the device by dma and come back by kernel" in record.getMessage()
    assert "out dma 54.0, kernel 44.0, back dma 53.0, kernel 50.0" in record.getMessage()
