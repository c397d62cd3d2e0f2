"""One side in a process of its own: a worker, and on one of the two a node's steps in the same process.

The steps, the orders and the results are of one thread, as in a node; the worker's own thread moves. So the
interpreter is shared as it is there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.node.loops import DecodeLoop, PromptLoop, StepTime, StepTimes, fill_blocks, share_cache
from benchmarks.node.model import MODEL_SIZES, BenchModel
from benchmarks.transfer.cases import Round, WorkerAddress
from benchmarks.transfer.process import StepFailed
from benchmarks.transfer.receiver import Receiver
from benchmarks.transfer.side import WorkerSide
from kvconnect.cache.specs import div_ceil
from kvconnect.pack.arena import auto_slot_bytes

_NAP_S = 0.0005


@dataclass(frozen=True)
class Window:
    """A time to measure in. What happens in the first ``ramp_s`` and the last ``tail_s`` does not count."""

    ramp_s: float
    seconds: float
    tail_s: float = 0.0


@dataclass(frozen=True)
class Flow:
    """What is received meanwhile: requests that ``source`` holds, at a rate."""

    requests: Round
    request_bytes: int
    bytes_per_s: float
    source: WorkerAddress


@dataclass(frozen=True)
class WindowResult:
    """What one side did in a window.

    ``seconds`` are those of the steps, or without steps the window's. ``last_in_slot`` says which request
    came to which blocks last, in and after the window.
    """

    seconds: float
    steps: StepTimes
    tokens: int
    received: int
    last_in_slot: Mapping[int, int]
    bytes_by_lane: Mapping[str, int]


class NodeSide(WorkerSide):
    """A worker that may compute. ``build`` comes after ``draw``, which says what is received where."""

    def __init__(self) -> None:
        super().__init__()
        self._loop: DecodeLoop | PromptLoop | None = None

    # Steps that the parent asks for

    def build(self, model_name: str, kind: str, batch: int, tokens: int) -> None:
        """Make the model, give it blocks that no request is received into, and capture its step.

        ``kind`` is ``decode`` or ``prompt``: steps of ``batch`` requests of ``tokens`` tokens.
        """
        cache = self.cache
        model = BenchModel(MODEL_SIZES[model_name], cache.shape.layout, cache.device)
        taken = {block for slot in cache.slots for block in slot}
        free = [block for block in range(1, cache.shape.num_blocks) if block not in taken]
        random.Random(model_name).shuffle(free)
        each = div_ceil(tokens, cache.shape.layout.block_tokens)
        blocks = [free[row * each : (row + 1) * each] for row in range(batch)]
        shared = share_cache(model, cache, batch, tokens)
        fill_blocks(shared, blocks)
        make = DecodeLoop if kind == "decode" else PromptLoop
        self._loop = make(model, shared, blocks, tokens)

    def auto_slot_bytes(self) -> int:
        """The size of slots where nobody says."""
        return auto_slot_bytes(self.cache.device)

    def measure(self, window: Window, flow: Flow | None) -> WindowResult:
        """Compute, receive, or both, and time it. Returns when nothing is under way to this side."""
        receiver = None
        if flow is not None:
            receiver = self._receiver(flow.requests, flow.source, flow.request_bytes, flow.bytes_per_s)
        self.connector.changes()
        began = time.perf_counter()
        until = began + window.ramp_s + window.seconds
        steps: list[StepTime] = []

        def exchange() -> None:
            # Once a step is launched, as a serving stack does: its own host work comes first.
            if receiver is not None:
                now = time.perf_counter()
                receiver.take(self.connector.results(), now)
                self.connector.start(receiver.orders(now))

        while time.perf_counter() < until + window.tail_s:
            if self._loop is not None:
                steps.append(self._loop.step(exchange))
            else:
                self._woken.wait(_NAP_S)
                self._woken.clear()
                exchange()
        deadline = time.monotonic() + self._timeout_s
        while receiver is not None and receiver.in_flight:
            results = self._next_results(deadline, f"{receiver.in_flight} requests have not arrived")
            receiver.take(results, time.perf_counter())
        return self._result(steps, receiver, began + window.ramp_s, until)

    # What the above is made of

    def _result(
        self, steps: list[StepTime], receiver: Receiver | None, counted_from: float, until: float
    ) -> WindowResult:
        """Of the window alone: steps and arrivals that ended in it.

        Raises:
            StepFailed: no two steps ended in it.
        """
        counted = StepTimes.within(steps, counted_from, until)
        if self._loop is not None and not counted.step_s:
            raise StepFailed(
                f"{len(steps)} steps ended within {until - counted_from:g} s: set seconds higher"
            )
        arrivals = receiver.arrivals if receiver else ()
        lanes, _ = self._counted()
        return WindowResult(
            seconds=sum(counted.step_s) or until - counted_from,
            steps=counted,
            tokens=len(counted.step_s) * (self._loop.tokens_per_step if self._loop else 0),
            received=sum(counted_from < arrival <= until for arrival in arrivals),
            last_in_slot=receiver.last_in_slot if receiver else {},
            bytes_by_lane=lanes,
        )
