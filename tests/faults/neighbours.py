"""What a fault at one node does to requests that do not need it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from tests.faults.kills import wait_in_flight
from tests.faults.load import Asked, Clients, Questions, Tally, Traffic, percentile
from tests.faults.reports import Report
from tests.faults.stage import Place, Side, StageOptions
from tests.faults.stops import stopped


@dataclass
class NeighbourReport(Report):
    """What a fault at one node did to requests that do not need it.

    ``ratio`` is the 99th percentile of the healthy requests' seconds beside the fault by that without it,
    both over all windows; ``worst_s`` the slowest healthy request beside the fault.
    """

    engine: str
    fault: str
    requests: int = 0
    hanging: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    ratio: float = 0.0
    p50_ratio: float = 0.0
    worst_s: float = 0.0


def neighbour_stage(engine: str, side: Side) -> StageOptions:
    """Two nodes of the side that one of is stopped, and one of the other."""
    places = {"prefill": (Place(),), "decode": (Place(),), side: (Place(), Place())}
    return StageOptions(
        engine,
        policy="fail",
        extra={"max_inflight_bytes": 16 << 20},
        num_blocks=500,
        prefills=places["prefill"],
        decodes=places["decode"],
        lengths=(1024, 777, 300, 64),
        max_tokens=4,
        deadline_s=40.0,
    )


def run_stopped_neighbour(
    questions: Questions, side: Side, *, windows: int, window_s: float
) -> NeighbourReport:
    """Stop the first node of ``side``, and time requests that need the second.

    Both sides of each comparison are windows of ``window_s`` seconds that take turns. Requests to the first
    nodes are under way when one of these is stopped, and are asked anew within the window.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    stage = questions.stage
    report = NeighbourReport(stage.options.engine, f"SIGSTOP of another {side} node")
    tally = Tally()
    router = stage.add_router(prefills=stage.prefills[-1:], decodes=stage.decodes[-1:]).url
    values: dict[bool, list[float]] = {False: [], True: []}
    with Traffic(questions) as hanging:
        for number in range(2 * windows):
            with_fault = number % 2 == 1
            under_way: list[Future[Asked]] = []
            with ExitStack() as fault:
                if with_fault:
                    handed = hanging.prefilled(2)
                    under_way = hanging.salvo()
                    wait_in_flight(stage.decode)
                    fault.enter_context(stopped(stage.first(side)))
                    under_way += hanging.fetch(handed)
                start = len(tally.asked)
                with Clients(questions, [router], tally, clients=1):
                    time.sleep(window_s)
            values[with_fault] += [one.seconds for one in tally.asked[start:]]
            for future in under_way:
                future.result()
            report.problems += stage.rest_problems()
    report.requests, report.hanging = len(tally.asked), len(hanging.tally.asked)
    report.p50_s, report.p99_s = (round(percentile(values[True], part), 4) for part in (0.5, 0.99))
    report.ratio = round(report.p99_s / max(1e-9, percentile(values[False], 0.99)), 3)
    report.p50_ratio = round(report.p50_s / max(1e-9, percentile(values[False], 0.5)), 3)
    report.worst_s = round(max(values[True], default=0.0), 4)
    report.problems += tally.problems() + hanging.tally.problems()
    report.problems += [f"a healthy request was refused: {text}" for text in tally.reasons()]
    return report
