"""What a fault at one node does to requests that do not need it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tests.faults.kills import Side, wait_in_flight
from tests.faults.load import SALVO, Asked, Clients, Questions, Tally, percentile, salvo, submit
from tests.faults.reports import Report
from tests.faults.stage import Actor, Place, Stage, StageOptions

_REST_TIMEOUT_S = 40.0


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


def run_neighbour(
    stage: Stage,
    questions: Questions,
    fault: str,
    inject: Callable[[], None],
    heal: Callable[[], None],
    healthy: tuple[Actor, Actor],
    faulty: tuple[Actor, Actor],
    *,
    windows: int,
    window_s: float,
) -> NeighbourReport:
    """Time requests over ``healthy`` nodes while those of the ``faulty`` ones hang, and while all is well.

    Both sides of each comparison are windows of ``window_s`` seconds that take turns. Requests to the faulty
    nodes are under way when ``inject`` is called, and are asked anew within the window.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    report = NeighbourReport(stage.options.engine, fault)
    tally, hanging = Tally(), Tally()
    router = stage.add_router(prefills=[healthy[0]], decodes=[healthy[1]]).url
    values: dict[bool, list[float]] = {False: [], True: []}
    with ThreadPoolExecutor(4 * SALVO) as pool:
        for number in range(2 * windows):
            with_fault = number % 2 == 1
            under_way: list[Future[Asked]] = []
            if with_fault:
                handed = [(index, questions.prefill(faulty[0], index)) for index in range(2)]
                under_way = salvo(questions, pool, hanging, faulty[0], faulty[1])
                wait_in_flight(faulty[1])
                inject()
                under_way += [
                    submit(questions, pool, hanging, faulty[1].url, index, params) for index, params in handed
                ]
            start = len(tally.asked)
            with Clients(questions, [router], clients=1, tally=tally):
                time.sleep(window_s)
            values[with_fault] += [one.seconds for one in tally.asked[start:]]
            if with_fault:
                heal()
            for future in under_way:
                future.result()
            if problem := stage.at_rest_problem(_REST_TIMEOUT_S):
                report.problems.append(problem)
    report.requests, report.hanging = len(tally.asked), len(hanging.asked)
    report.p50_s, report.p99_s = (round(percentile(values[True], part), 4) for part in (0.5, 0.99))
    report.ratio = round(report.p99_s / max(1e-9, percentile(values[False], 0.99)), 3)
    report.p50_ratio = round(report.p50_s / max(1e-9, percentile(values[False], 0.5)), 3)
    report.worst_s = round(max(values[True], default=0.0), 4)
    report.problems += tally.problems() + hanging.problems()
    report.problems += [f"a healthy request was refused: {text}" for text in tally.reasons()]
    return report


def neighbour_stage(engine: str, side: Side) -> StageOptions:
    """Two nodes of the side that one of is stopped, and one of the other."""
    one, two = (Place(),), (Place(), Place())
    extra = {"max_inflight_bytes": 16 << 20}
    prefills, decodes = (two, one) if side == "prefill" else (one, two)
    return StageOptions(
        engine, policy="fail", extra=extra, num_blocks=500, prefills=prefills, decodes=decodes
    )


def run_stopped_neighbour(
    stage: Stage, questions: Questions, side: Side, *, windows: int, window_s: float
) -> NeighbourReport:
    """Stop the first node of ``side``, and time requests that need the second.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    victim = stage.prefill if side == "prefill" else stage.decode
    return run_neighbour(
        stage,
        questions,
        f"SIGSTOP of another {side} node",
        lambda: victim.send(signal.SIGSTOP),
        lambda: victim.send(signal.SIGCONT),
        (stage.prefills[-1], stage.decodes[-1]),
        (stage.prefills[0], stage.decodes[0]),
        windows=windows,
        window_s=window_s,
    )
