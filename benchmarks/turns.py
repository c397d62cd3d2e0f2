"""What a turn of the transfer thread and a step of the scheduler half cost while others are at rest.

Two workers as in the tests, in one process, on a clock that stands still: nothing is due. What is at rest
must cost a turn nothing, so that the last column stays near 1.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from benchmarks.harness import Options as BaseOptions
from benchmarks.harness import report
from kvconnect.config import ExtraConfig
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.peer.handles import Claims
from kvconnect.transfer.orders import Await, Orders, Results
from kvconnect.transfer.stack import LongestRequest
from tests.halves.test_scheduler_half import ATTENTION, HANDLES, Request, connector
from tests.transfer.pair import Pair

_BLOCKS = 12_000
_PROMPT_TOKENS = 2048
_BLOCK_IDS = [*range(1, 1 + _PROMPT_TOKENS // ATTENTION.block_size)]


@dataclass(frozen=True)
class Options(BaseOptions):
    turns: Annotated[int, "Turns of each kind; the least is 10."] = 2000
    records: Annotated[list[int], "Records at rest (repeatable)."] = field(
        default_factory=lambda: [10, 1_000, 10_000]
    )


def bench_turns(options: Options) -> None:
    """Time turns of P and D, and steps of their scheduler halves, beside so many records.

    Medians in microseconds of a turn or a step.
    """
    for what, make in RESTING.items():
        medians = _times([make(count) for count in options.records], options.turns)
        taken = {f"at_{count}_us": median for count, median in zip(options.records, medians, strict=True)}
        report("turns", {"what": what, **taken, "last_over_first": medians[-1] / medians[0]})


def _times(calls: list[Callable[[], object]], turns: int) -> list[float]:
    """Median microseconds of each call. They take turns, since a machine's speed may change within a minute.

    Collections of garbage look at every record: they are held off.
    """
    for call in calls:
        for _ in range(turns // 10):
            call()
    gc.collect()
    gc.disable()
    try:
        taken: list[list[float]] = [[] for _ in calls]
        for _ in range(turns):
            for call, times in zip(calls, taken, strict=True):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
        return [statistics.median(times) * 1e6 for times in taken]
    finally:
        gc.enable()


def _pair() -> Pair:
    most = 20_000
    config = ExtraConfig(max_peers=most, max_leases=most, max_loads=most, peer_timeout_s=2400.0)
    return Pair(config, prefill_blocks=_BLOCKS, decode_blocks=_BLOCKS)


def _quiet(pair: Pair) -> Pair:
    """Let all orders be sent and answered."""
    for _ in range(8):
        for worker in pair.workers:
            worker.step(pair.clock.now)
    return pair


def _both_turn(pair: Pair) -> Callable[[], object]:
    def turn() -> None:
        for worker in pair.workers:
            worker.transfers.step(pair.clock.now)

    return turn


def _leases(count: int) -> Callable[[], object]:
    pair = _pair()
    for number in range(count):
        pair.hold(f"r{number}", (1 + number,))
    return _both_turn(_quiet(pair))


def _loads(pair: Pair, count: int) -> Pair:
    """Requests of D whose fetches wait at P, which prefills them."""
    pair.prefill.order(Orders(expected=tuple(f"handle-r{n}" for n in range(count))), _done)
    for number in range(count):
        pair.load(f"r{number}", (1 + number,))
    return _quiet(pair)


def _peers(count: int) -> Callable[[], object]:
    """D has met so many, and keeps a handle at each."""
    pair = _pair()
    first, channels = 100_000, pair.network._channels
    channels |= dict.fromkeys(range(first, first + count), pair.prefill.channel)
    awaited = (Await(f"handle-r{n}", ("", "h", first + n)) for n in range(count))
    pair.decode.order(Orders(awaited=tuple(awaited)), _done)
    return _both_turn(_quiet(pair))


def _handles(count: int) -> Callable[[], object]:
    """Requests of D that wait for blocks, while one peer holds their KV."""
    pair = _pair()
    for number in range(count):
        pair.hold(f"r{number}", (1 + number,))
    port = pair.prefill.channel.port
    awaited = (Await(f"handle-r{n}", ("P", "h", port)) for n in range(count))
    pair.decode.order(Orders(awaited=tuple(awaited)), _done)
    return _both_turn(_quiet(pair))


def _request(count: int) -> Callable[[], object]:
    """A request is held, fetched and landed beside others that wait."""
    pair = _loads(_pair(), count)
    numbers = iter(range(1_000_000))

    def pass_one() -> None:
        name = f"passing{next(numbers)}"
        before = len(pair.decode.results)
        pair.start(name, (_BLOCKS - 1,), (_BLOCKS - 1,))
        while len(pair.decode.results) == before:
            for worker in pair.workers:
                worker.step(pair.clock.now)

    return pass_one


def _done() -> bool:
    return True


def _half(role: str, **traits: Any) -> SchedulerHalf:
    """A scheduler half of this role, whose directory has been ordered."""
    half: SchedulerHalf = connector(role, num_blocks=1 << 20, **traits)  # type: ignore[no-untyped-call]
    half.build_orders()
    return half


def _handed(n: int) -> dict[str, Any]:
    """The parameters that D gets for a prompt that P holds."""
    claims = Claims("P", "epoch", f"request-{n}", _PROMPT_TOKENS, "10.0.0.2", 5600, expires_at=0)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "P",
        "remote_host": "10.0.0.2",
        "remote_port": 5600,
        "remote_num_tokens": _PROMPT_TOKENS,
        "kvconnect_handle": HANDLES.make(claims),
    }


def _prefilling(count: int) -> Callable[[], object]:
    """Steps of P's scheduler half while prefills that D knows of are under way."""
    half = _half("kv_producer")
    for n in range(count):
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"transfer-{n}"}
        request = Request(f"r{n}", _PROMPT_TOKENS, asked)
        half.new_request(request)
        half.matched_tokens(request, 0)
        half.update_after_alloc(request, (_BLOCK_IDS,), 0)
    return _step(half)


def _waiting(count: int) -> Callable[[], object]:
    """Steps of D's scheduler half while its requests are loaded."""
    half = _half("kv_consumer")
    for n in range(count):
        request = Request(f"r{n}", _PROMPT_TOKENS, _handed(n))
        half.new_request(request)
        found, _ = half.matched_tokens(request, 0)
        half.update_after_alloc(request, (_BLOCK_IDS,), found or 0)
    return _step(half)


def _early(count: int) -> Callable[[], object]:
    """One request asks D's scheduler half whether it may begin, while so many wait for blocks."""
    half = _half("kv_consumer", longest=LongestRequest(2048, 2048))
    for n in range(count):
        request = Request(f"r{n}", _PROMPT_TOKENS, _announced(n))
        half.new_request(request)
        half.matched_tokens(request, 0)
    asks = Request("asks", _PROMPT_TOKENS, _announced(0))
    half.new_request(asks)
    half.build_orders()
    return lambda: half.matched_tokens(asks, 0)


def _announced(n: int) -> dict[str, Any]:
    handed = _handed(n)
    del handed["kvconnect_handle"]
    return {**handed, "transfer_id": f"transfer-{n}"}


def _step(half: SchedulerHalf) -> Callable[[], object]:
    half.build_orders()

    def step() -> None:
        half.build_orders()
        half.update_results(Results())

    return step


RESTING: dict[str, Callable[[int], Callable[[], object]]] = {
    "a turn of both, P holds": _leases,
    "a turn of both, fetches of D wait at P": lambda count: _both_turn(_loads(_pair(), count)),
    "a turn of both, D has met peers": _peers,
    "a turn of both, D awaits handles": _handles,
    "a request passes, others wait at P": _request,
    "a step of P, prefills are announced": _prefilling,
    "a step of D, requests are loaded": _waiting,
    "a look of D at an early request": _early,
}
