"""Driving two children through one measurement: without and with, in turn, then a look at what arrived.

Runs in the parent and only asks, compares and reports; every clock and every byte is in the children.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.node.loops import step_percentiles
from benchmarks.node.options import Options
from benchmarks.node.side import Flow, Window, WindowResult
from benchmarks.options import parse_environment
from benchmarks.report import Report, note
from benchmarks.transfer.cases import Round
from benchmarks.transfer.pair import SEEDS, Devices, compare_pages, devices_of, open_workers
from benchmarks.transfer.process import ChildPair, StepFailed

NODE_SIDE = "benchmarks.node.side:NodeSide"
# The part of the asked rate that counts as all of it.
_NEARLY = 0.95
_RAMP_S = 0.5
# How much longer the side that receives goes on than the one that computes, so that it covers it.
_TAIL_S = 0.25


class NodePair:
    """A node with its peer, opened, and the windows that it is asked for."""

    def __init__(self, pair: ChildPair, options: Options, devices: Devices) -> None:
        self._pair, self._options = pair, options
        self._numbers = itertools.count(1)
        self._landed: dict[int, int] = {}
        self._window = Window(_RAMP_S, options.seconds)
        whole_s = _RAMP_S + options.seconds + _TAIL_S
        # As many as the rate asks for, and those that make up for a pause.
        self._held = math.ceil(whole_s * options.bytes_per_s / options.request_bytes) + options.in_flight
        self._source = open_workers(
            pair, options.engine, options.used_protocol, devices, options.shapes(), options
        )
        blocks = zip(options.request_blocks(), SEEDS, strict=True)
        pair.both("draw", *((options.in_flight, count, seed) for count, seed in blocks))
        self._node = pair.decode if options.side == "decode" else pair.prefill
        kind = "decode" if options.side == "decode" else "prompt"
        self._node.ask("build", options.used_model, kind, options.used_batch, options.used_context)
        self.shared_gpu = options.device == "cuda" and devices[0] == devices[1]
        self.slot_bytes: int = pair.decode.ask("auto_slot_bytes")

    @property
    def engine(self) -> str:
        """The engine that the workers took."""
        return self._source.engine

    def meet(self) -> None:
        """A round that does not count: it meets the peer, maps memory and compiles kernels."""
        asked = self._round(2 * self._options.in_flight)
        self._pair.prefill.ask("hold", asked)
        self._pair.decode.ask("load", asked, self._source)
        self._pair.prefill.ask("drain", asked)
        self._pair.decode.ask("clear")

    def without(self) -> WindowResult:
        """A window in which nothing is under way."""
        result: WindowResult = self._node.ask("measure", self._window, None)
        return result

    def with_transfers(self) -> tuple[WindowResult, WindowResult]:
        """A window in which requests are received: what the node did, and what the receiver did."""
        options, pair = self._options, self._pair
        asked = self._round(self._held)
        pair.prefill.ask("hold", asked)
        flow = Flow(asked, options.request_bytes, options.bytes_per_s, self._source)
        sender: WindowResult
        receiver: WindowResult
        if self._node is pair.decode:
            sender = receiver = pair.decode.ask("measure", self._window, flow)
        else:
            longer = Window(_RAMP_S, options.seconds, _TAIL_S)
            sender, receiver = pair.both("measure", (self._window, None), (longer, flow))
        self._landed.update(receiver.last_in_slot)
        return sender, receiver

    def check(self) -> int:
        """Compare every page of the requests that came to their blocks last with where it came from.

        Returns how many requests that were.

        Raises:
            StepFailed: a page differs, or nothing was received.
        """
        if not self._landed:
            raise StepFailed("no request was received: set seconds higher, or request_mb lower")
        options = self._options
        compare_pages(self._pair, self._landed, options.in_flight, options.layouts.group_tokens)
        return len(self._landed)

    def _round(self, requests: int) -> Round:
        options = self._options
        return Round(f"round{next(self._numbers)}", requests, options.in_flight, options.request_tokens)


def measure_node(options: Options, devices: Devices) -> dict[str, Any]:
    """Alternate windows without and with transfers.

    Raises:
        StepFailed: a child failed, or bytes are wrong.
    """
    with ChildPair(NODE_SIDE, parse_environment(options.environment), options.timeout_s) as pair:
        node = NodePair(pair, options, devices)
        node.meet()
        without: list[WindowResult] = []
        computed: list[WindowResult] = []
        received: list[WindowResult] = []
        for _ in range(options.rounds):
            without.append(node.without())
            result, receiver = node.with_transfers()
            computed.append(result)
            received.append(receiver)
        verified = node.check()
        return {**_timing(options, node, without, computed, received), "verified": verified}


def _timing(
    options: Options,
    node: NodePair,
    without: Sequence[WindowResult],
    computed: Sequence[WindowResult],
    received: Sequence[WindowResult],
) -> dict[str, Any]:
    """One measured setting of the transfer threads.

    Rates are medians of the windows, ``tokens_per_s_windows`` by window in order, ``ratio`` that of the
    medians. Times of steps are those of all windows of a kind: the whole step, what the host did until it
    was launched, and what the GPU worked. ``verified`` counts the requests whose bytes were compared.
    """
    config = options.worker_config()
    rates = tuple(round(one.received * options.request_bytes / options.seconds / 1e9, 4) for one in received)
    before, after = (
        tuple(round(one.tokens / one.seconds, 1) for one in windows) for windows in (without, computed)
    )
    lanes: Counter[str] = Counter()
    for one in received:
        lanes.update(one.bytes_by_lane)
    return {
        "side": options.side,
        "engine": node.engine,
        "protocol": options.used_protocol,
        "lane": "+".join(lane for lane, _ in lanes.most_common()),
        "device": options.device,
        "shared_gpu": node.shared_gpu,
        "model": options.used_model,
        "batch": options.used_batch,
        "context": options.used_context,
        "layouts": str(options.layouts),
        "slot_bytes": config.slot_bytes or node.slot_bytes,
        "num_slots": config.num_slots,
        "request_bytes": options.request_bytes,
        "requests_in_flight": options.in_flight,
        "asked_gb_per_s": options.bytes_per_s / 1e9,
        "gb_per_s": statistics.median(rates),
        "gb_per_s_windows": rates,
        "tokens_per_s_without": statistics.median(before),
        "tokens_per_s_with": statistics.median(after),
        "ratio": round(statistics.median(after) / statistics.median(before), 4),
        "tokens_per_s_windows_without": before,
        "tokens_per_s_windows_with": after,
        "steps_without": sum(len(one.steps.step_s) for one in without),
        "steps_with": sum(len(one.steps.step_s) for one in computed),
        **step_percentiles([one.steps for one in without], [one.steps for one in computed]),
    }


def bench_node(options: Options, report: Report) -> int:
    """Time a node's steps while KV is received without pause, beside those while it is not.

    Returns 0, or 1 if it could not be measured, which is shown.

    Raises:
        ConfigError: the device is not there.
    """
    devices = devices_of(options.device)
    try:
        found = measure_node(options, devices)
    except StepFailed as error:
        report.failed(error)
        return 1
    report.add(found)
    if found["shared_gpu"]:
        note("both sides are on one GPU: the peer's kernels take from the node too")
    arrived, asked = found["gb_per_s"], found["asked_gb_per_s"]
    if arrived < _NEARLY * asked:
        note(f"{arrived:.4g} GB/s arrived of the {asked:.4g} that were asked for")
    return 0
