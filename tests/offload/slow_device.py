"""A device that puts its work off: queues of work whose heads are done in random order, when somebody looks.

Whatever is not ordered by an event can be done in any order, so a wait that is missing shows.
"""

from __future__ import annotations

import ctypes
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

from kvconnect.pack.batches import StagedChunk
from kvconnect.pack.launcher import FIELDS, Launcher
from kvconnect.pack.numbers import NumberBuffer


class SlowEvent:
    def __init__(self, device):
        self.device, self.passed = device, False

    def query(self):
        self.device.work(self.device.random.randrange(4))
        return self.passed

    def synchronize(self):
        self.device.work_until(lambda: self.passed)

    def elapsed_time(self, later):
        assert self.passed
        assert later.passed
        return 500.0


class SlowQueue:
    """Work is ``("do", call)``, ``("record", event)`` or ``("wait", event)``."""

    def __init__(self, device):
        self.device, self.work = device, []
        device.queues.append(self)

    def current(self):
        return nullcontext()

    def run(self, launch):
        # Like a stream, a queue does not own what its work reads.
        self.work.append(("do", partial(launch.func, *map(unowned, launch.args))))

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


def unowned(value):
    if isinstance(value, NumberBuffer):
        return SimpleNamespace(
            values=value.values, tensor=value.tensor, count=value.count, host_address=value.host_address
        )
    return replace(value, lent=None) if isinstance(value, StagedChunk) else value


class PlainLauncher(Launcher):
    """Does what the kernels do, a page at a time."""

    def load(self, lent):
        lent.tensor[: lent.count] = torch.from_numpy(lent.values[: lent.count])

    def start(self, staged, slot, pack, seed=None):
        numbers = staged.tensor.tolist()
        for launch in staged.layout.launches:
            unit = launch.access.unit
            for batch in range(launch.num_batches):
                fields = numbers[launch.batches_at + batch * FIELDS :][:FIELDS]
                _, lane_tiles, tiles, _, lanes_at, blocks_at, count, _, _, _, units, stride, *_ = fields
                for lane in range(lane_tiles // tiles):
                    address, offset = numbers[lanes_at + 2 * lane :][:2]
                    for page in range(count):
                        block, place = (numbers[blocks_at + at + page] for at in (0, count))
                        ours, theirs = address + block * stride, slot + place + offset * unit
                        assert ours % unit == theirs % unit == 0
                        ctypes.memmove(*((theirs, ours) if pack else (ours, theirs)), units * unit)
