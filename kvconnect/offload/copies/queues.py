"""What a copier asks of a device: queues of work that is done in order, and events between them.

CUDA's streams are such queues; ``cuda_queues`` has them. A test can have others, which put work off for as
long as they may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvconnect.offload.copies.rows import Column


class Event(Protocol):
    """A point in a queue."""

    @property
    def done(self) -> bool:
        """All work before it is done. Raises whatever the device says where some of it failed."""
        ...

    def wait(self) -> None:
        """Block the calling thread until it is done."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """Time of the device between two timed events that are done."""
        ...


class Queue(Protocol):
    """Work is begun in the order in which it is given, and nothing is begun before all before it is done."""

    def run(self, launch: Callable[[], None]) -> None:
        """Work that ``launch`` gives to the queue, which is the current one while it is called."""
        ...

    def copy(self, source: Column, target: Column, length: Column) -> None:
        """Copy stretches of memory by the device's copy engines, in any order."""
        ...

    def record(self, timed: bool = False) -> Event:
        """The point after what was given so far."""
        ...

    def wait_for(self, event: Event) -> None:
        """Begin nothing that is given from now on before an event of any queue."""
        ...


class Device(Protocol):
    """A device with queues."""

    def compute(self) -> Queue:
        """The calling thread's queue, which runs the model's steps."""
        ...

    def make_queue(self) -> Queue:
        """A queue of its own."""
        ...
