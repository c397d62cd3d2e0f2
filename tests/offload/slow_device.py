"""A device that puts its work off: queues of work whose heads are done in random order, when somebody looks.

Whatever is not ordered by an event can be done in any order, so a wait that is missing shows.
"""

from __future__ import annotations

import ctypes
import random

import numpy as np

from kvconnect.offload.copies.tiles import BATCH_FIELDS, TILE_FIELDS


class SlowEvent:
    def __init__(self, device):
        self.device, self.passed = device, False

    @property
    def done(self):
        self.device.work(self.device.random.randrange(4))
        return self.passed

    def wait(self):
        self.device.work_until(lambda: self.passed)

    def seconds_since(self, earlier):
        assert self.passed
        assert earlier.passed
        return 0.5


class SlowQueue:
    """Work is ``("do", call)``, ``("record", event)`` or ``("wait", event)``."""

    def __init__(self, device):
        self.device, self.work = device, []
        device.queues.append(self)

    def run(self, launch):
        self.work.append(("do", launch))

    def copy(self, source, target, length):
        if self.device.copies_left == 0:
            self.device.copies_left = None
            raise RuntimeError("no more copies")
        if self.device.copies_left is not None:
            self.device.copies_left -= 1

        def copy():
            for here, there, size in zip(source.tolist(), target.tolist(), length.tolist(), strict=True):
                ctypes.memmove(there, here, size)

        self.work.append(("do", copy))

    def record(self, timed=False):
        event = SlowEvent(self.device)
        self.work.append(("record", event))
        return event

    def wait_for(self, event):
        self.work.append(("wait", event))

    def step(self):
        """Do the head; False if it cannot be done yet."""
        if not self.work:
            return False
        what, which = self.work[0]
        if what == "wait" and not which.passed:
            return False
        self.work.pop(0)
        if what == "do":
            which()
        elif what == "record":
            which.passed = True
        return True


class SlowDevice:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.queues = []
        self.copies_left = None
        self.of_model = SlowQueue(self)

    def compute(self):
        return self.of_model

    def make_queue(self):
        return SlowQueue(self)

    def work(self, steps):
        for _ in range(steps):
            self.random.choice(self.queues).step()

    def work_until(self, reached):
        while not reached():
            queues = self.random.sample(self.queues, len(self.queues))
            assert any(queue.step() for queue in queues), "the device waits for ever"

    def finish(self):
        self.work_until(lambda: not any(queue.work for queue in self.queues))


class PlainNumbers:
    def __init__(self, length):
        self.column, self.loaded = np.zeros((2, length), dtype=np.int64)


class PlainMover:
    """Does what the kernel does, a tile at a time."""

    def __init__(self, table):
        self.table = table

    def make_numbers(self, length):
        return PlainNumbers(length)

    def load(self, numbers, length):
        numbers.loaded[:length] = numbers.column[:length]

    def start(self, numbers, launches, rows_at, to_rows, programs=0):
        loaded = numbers.loaded
        for launch in launches:
            numbers = loaded[launch.numbers_at :]
            batches = numbers[launch.batches_at :][: launch.num_batches * BATCH_FIELDS]
            batches = batches.reshape(-1, BATCH_FIELDS).tolist()
            ends = [batch[0] for batch in batches[1:]] + [launch.num_items]
            for (first, tiles_each, tiles_at, pairs_at), end in zip(batches, ends, strict=True):
                for place in range(end - first):
                    tile = (tiles_at + place % tiles_each) * TILE_FIELDS
                    address, stride, offset, length = self.table.numbers[tile : tile + TILE_FIELDS].tolist()
                    block, row = numbers[pairs_at + place // tiles_each * 2 :][:2].tolist()
                    page, row = address + block * stride, rows_at + row + offset
                    assert page % launch.unit == row % launch.unit == length % launch.unit == 0
                    assert length <= self.table.tile_bytes[launch.unit]
                    ctypes.memmove(*((row, page) if to_rows else (page, row)), length)
