"""The invariants of the design, each a function that looks at the simulation after a step.

They see what really happens to memory and what the workers report, and nothing of what the workers believe,
but for the last ones, which look at their books when all should be over.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvconnect.engine.base import Batch
from kvconnect.engine.memory import MemoryEngine
from kvconnect.outcome import Reason
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.receipt import COMPUTED, DEVICE, LOADED, UNSERVED
from kvconnect.transfer.orders import Found, Hold, Load, Orders, Results
from kvconnect.transfer.params import HANDLE_KEY, TRANSFER_KEY
from kvconnect.transfer.slots import SlotState
from tests.simulator.engine import SimEngine
from tests.simulator.request import SimRequest
from tests.simulator.stranger import Scribbler
from tests.simulator.world import World

if TYPE_CHECKING:
    from tests.simulator.node import SimNode
    from tests.simulator.worker import SimWorker


@dataclass(eq=False)
class Owed:
    """An order that must be reported once. ``blocks`` are those that it names.

    ``since`` is by the clock of the worker, see ``SimWorker.awake_s``.
    """

    order: Hold | Load
    blocks: frozenset[int]
    since: float


@dataclass(eq=False)
class Books:
    """What one worker owes, by request; and the generation of each taken slot, by address, and since when.

    Of ``finds`` it has since when each was asked, all by the worker's clock; of the offload's ``jobs``
    whether each parks KV.
    """

    holds: dict[str, Owed] = field(default_factory=dict)
    loads: dict[str, Owed] = field(default_factory=dict)
    finds: dict[str, list[float]] = field(default_factory=dict)
    restores: set[str] = field(default_factory=set)
    jobs: dict[int, bool] = field(default_factory=dict)
    slots: dict[int, tuple[int, float]] = field(default_factory=dict)


class Exceptions(logging.Handler):
    """Takes note of every exception that the code under test logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, _ = record.exc_info
            self.texts.append(f"{record.getMessage()}: {kind.__name__}: {error}")


def left_at(node: SimNode, books: Mapping[SimWorker, Books]) -> dict[str, int]:
    """What a node holds, owes and remembers."""
    left = {f"the scheduler half's {name}": count for name, count in node.connector.state().items()}
    left["blocks"] = node.pool.held
    left["requests"] = len(node.scheduler.requests) + len(node.scheduler.kept)
    for worker in node.workers:
        prefill, decode, owed = worker.prefill, worker.decode, books[worker]
        for what, count in (
            ("unreported holds", len(owed.holds)),
            ("unreported loads", len(owed.loads)),
            ("unreported finds", sum(map(len, owed.finds.values()))),
            ("unreported restores", len(owed.restores)),
            ("unreported jobs", len(owed.jobs)),
            ("finds", len(decode.finds)),
            ("leases", len(prefill.leases)),
            ("expected prefills", len(prefill.book.expected)),
            ("waiting fetches", len(prefill.pending.fetches)),
            ("early releases", len(prefill.book.released)),
            ("sendings", len(prefill.sender.sendings)),
            ("send slots", worker.send.taken),
            ("loads", len(decode.loads)),
            ("awaited handles", len(decode.renewals.awaited)),
            ("landing slots", worker.landing.taken),
            ("landings", len(decode.bay)),
        ):
            left[f"{worker.who}'s {what}"] = count
        for what, count in worker.tiers.state().items() if worker.tiers is not None else ():
            left[f"{worker.who}'s offload {what}"] = count
    return left


SLACK_S = 5.0
"""What the network and a worker's own pace may add to a bound."""
STILL_S = 10.0
"""Where nothing goes wrong, and somebody waits, something moves within that time."""


class Checks:
    """All checkers of a run, and the little they remember."""

    def __init__(self, world: World, longest_wait_s: float) -> None:
        self.world = world
        self.exceptions = Exceptions()
        self.scribbler: Scribbler | None = None
        self.counts = Counter[str]()
        self.reasons = Counter[str]()
        self.failed: dict[str, str] = {}
        self._moved_at = world.now
        self._longest_wait_s = longest_wait_s
        self._books: dict[SimWorker, Books] = {}
        self._by_engine: dict[int, SimWorker] = {}
        self._loaded: dict[str, int] = {}
        self._forged: set[str] = set()
        self._opened: set[str] = set()
        self._loaded_by: dict[str, str] = {}

    def count(self, what: str, number: int = 1) -> None:
        """Some more of something, for the summary."""
        if number:
            self.counts[what] += number

    # What happens

    def moved(self) -> None:
        """A token was computed, a byte is on its way, a client was answered, or something ended."""
        self._moved_at = self.world.now

    def begin(self, worker: SimWorker) -> None:
        """A worker is there."""
        self._books[worker] = Books()
        self._by_engine[id(worker.engine)] = worker

    def ordered(self, worker: SimWorker, orders: Orders) -> None:
        """A worker is given orders."""
        books = self._books[worker]
        for hold in orders.holds:
            books.holds[hold.request_id] = self._owed(worker, hold, hold.groups)
        for load in orders.loads:
            self.forged_opens_nothing(load)
            if load.parks:
                books.jobs.update((park.job, True) for park in load.parks)
                continue
            books.loads[load.request_id] = self._owed(worker, load, load.groups)
            self._loaded_by[load.request_id] = "name" if load.prefix is not None else "handle"
        tiers = orders.offload
        books.jobs.update((store.job, False) for store in tiers.stores)
        books.jobs.update((seek.job, False) for seek in (*tiers.fetches, *tiers.seeks))
        for restore in tiers.restores:
            books.restores.add(restore.request_id)
            self._loaded_by[restore.request_id] = "restore"
            half = worker.node.connector.offload
            if half is not None and restore.request_id in half.parking.restoring:
                self._loaded_by[restore.request_id] = "parked"
        for receipt in orders.receipts if worker.rank == 0 else ():
            self.receipt_adds_up(worker, receipt)
        # For all ranks.
        for find in orders.finds if worker.rank == 0 else ():
            books.finds.setdefault(find.request_id, []).append(worker.awake_s)

    def _owed(self, worker: SimWorker, order: Hold | Load, groups: tuple[GroupBlocks, ...]) -> Owed:
        blocks = frozenset(block for group in groups for block in group.block_ids if block)
        return Owed(order, blocks, worker.awake_s)

    def reported(self, worker: SimWorker, results: Results) -> None:
        """A worker reports what ended."""
        self.moved()
        books = self._books[worker]
        for what, names, owed in (
            ("sent", results.sent, books.holds),
            ("received", results.received, books.loads),
        ):
            for name in names:
                self.each_once(worker, what, name, owed)
                if name in owed:
                    ended = owed.pop(name)
                    self.in_time(worker, ended)
                    if what == "sent":
                        self.nobody_reads(worker, ended)
                    else:
                        self.nobody_writes(worker, ended)
        for found in results.found:
            self.found_once_and_in_time(worker, found, books.finds)

    def restored(self, worker: SimWorker, results: Results) -> None:
        """The tiers of a worker report what ended."""
        books = self._books[worker]
        for name in results.received:
            self.each_once(worker, "restored", name, books.restores)
            books.restores.discard(name)
        for report in results.offload:
            for job, failed in report.done.items():
                self.each_once(worker, "done", job, books.jobs)
                if books.jobs.pop(job, False):
                    self.count("parks failed" if failed else "parks ok")

    def stepped(self, worker: SimWorker) -> None:
        self.no_exception(worker)
        self.slots_add_up(worker)
        self.slots_come_back(worker)
        self.within_bounds(worker)

    def node_stepped(self, node: SimNode) -> None:
        self.blocks_add_up(node)

    def submitted(self, engine: SimEngine, batch: Batch) -> None:
        """A batch can move from now on."""
        self.no_page_is_read(engine, batch)
        self.no_page_is_written(engine, batch, engine.target_of(batch))

    def moves(self, engine: SimEngine, batch: Batch, target: MemoryEngine | None) -> None:
        """The bytes of a batch move now."""
        self.moved()
        self.no_page_is_written(engine, batch, target)
        worker = self._by_engine.get(id(target))
        if self.scribbler is not None and worker is not None and not worker.is_strange:
            self.scribbler.saw(batch, worker)

    def loads(self, node: SimNode, request: SimRequest, num_tokens: int) -> None:
        """A node begins to load a request, up to so many tokens."""
        self._loaded[request.request_id] = num_tokens
        if request.is_forged:
            self._forged.add(request.request_id)

    def load_ended(self, node: SimNode, request: SimRequest, why: Reason | None) -> None:
        """A load succeeded, and its KV is served from now on; or it failed."""
        way = self._loaded_by[request.request_id]
        suffix = "" if way == "handle" else f" by {way}"
        if why is None:
            self.count(f"loads ok{suffix}")
            if not node.plan.is_stranger and way in ("handle", "parked"):
                self.opens_once(request)
            self.bytes_are_right(node, request, self._loaded[request.request_id], later=False)
            return
        del self._loaded[request.request_id]
        self.count(f"loads failed{suffix}")
        if request.is_forged:
            self.count("forged handles refused")
        else:
            if way != "name":
                self.failed[request.request_id] = why.text
            self.reasons[why.text] += 1

    def served(self, node: SimNode, request: SimRequest) -> None:
        """A request that was computed with its KV is done."""
        num_tokens = self._loaded.pop(request.request_id, None)
        if num_tokens is not None and request.loaded:
            self.bytes_are_right(node, request, num_tokens, later=True)

    def freed(self, node: SimNode, name: str) -> None:
        """All ranks say that nobody needs a held request's blocks."""
        request = node.scheduler.kept.get(name)
        if request is not None:
            assert isinstance(request, SimRequest)
            self.count("holds ended")
            if not request.is_computed():
                # Nobody wanted it before it was there.
                return
            self.bytes_are_right(node, request, request.num_prompt_tokens, later=True)

    # The invariants

    def nobody_writes(self, worker: SimWorker, owed: Owed) -> None:
        """1: D reports no request as received while a kernel can still write to its blocks."""
        if not worker.is_strange and worker.packing_touches(owed.blocks, "target"):
            self.world.fail("nobody_writes", f"{worker.who} still unpacks to {owed.order.request_id}")

    def nobody_reads(self, worker: SimWorker, owed: Owed) -> None:
        """1: P frees no block while a kernel can still read it."""
        # Two prompts with one beginning share blocks, which stay where they are.
        freed = frozenset(block for block in owed.blocks if worker.node.pool.has_one_holder(block))
        if worker.packing_touches(freed, "source"):
            self.world.fail("nobody_reads", f"{worker.who} still packs from {owed.order.request_id}")

    def no_page_is_written(self, engine: SimEngine, batch: Batch, target: MemoryEngine | None) -> None:
        """1: peers write to slots, whatever is loaded."""
        worker = self._by_engine.get(id(target))
        if worker is None or worker.is_strange:
            return
        touched = worker.memory.blocks_at(batch.target, batch.total_bytes)
        if touched:
            self.world.fail(
                "no_page_is_written",
                f"batch {batch.batch_id} of {engine.who} writes to blocks {sorted(touched)} of {worker.who}",
            )

    def no_page_is_read(self, engine: SimEngine, batch: Batch) -> None:
        """1: the engine reads slots, whatever is held."""
        touched = self._by_engine[id(engine)].memory.blocks_at(batch.source, batch.total_bytes)
        if touched:
            self.world.fail(
                "no_page_is_read",
                f"batch {batch.batch_id} of {engine.who} reads blocks {sorted(touched)}",
            )

    def landing_slot_is_quiet(self, worker: SimWorker, address: int) -> None:
        """1: D grants no slot while a peer that keeps to the rules can still write to it.

        A peer that was stopped may write when it goes on: that is what digests are for.
        """
        for other in self._books if not worker.is_strange else ():
            for batch, until in other.engine.may_move.values() if not other.is_strange else ():
                if (
                    self.world.now < until < math.inf
                    and other.engine.target_of(batch) is worker.engine
                    and address == batch.target
                ):
                    self.world.fail(
                        "slots_are_quiet",
                        f"{worker.who} grants landing slot {worker.memory.landing.index(address)}, and batch "
                        f"{batch.batch_id} of {other.who} may still write to it",
                    )

    def send_slot_is_quiet(self, worker: SimWorker, address: int) -> None:
        """1: P packs into no slot while its engine can still read it."""
        for batch, until in worker.engine.may_move.values():
            if until > self.world.now and address == batch.source:
                self.world.fail(
                    "slots_are_quiet",
                    f"{worker.who} packs into send slot {worker.memory.send.index(address)}, and batch "
                    f"{batch.batch_id} may still read it",
                )

    def slot_is_granted(self, worker: SimWorker, address: int) -> None:
        """6: D takes what lies in a slot if the peer to which it granted that says so, and once."""
        if not worker.is_strange and not worker.channel.grants.use(address):
            self.world.fail(
                "slot_is_granted",
                f"{worker.who} unpacks landing slot {worker.memory.landing.index(address)}, and the peer to "
                "which it was granted has not said that anything lies there",
            )

    def each_once(self, worker: SimWorker, what: str, name: object, owed: Container[object]) -> None:
        """2: every id that was ordered comes back exactly once, and no other does."""
        if name not in owed:
            self.world.fail("each_once", f"{worker.who} reports {name} as {what}, which it does not owe")

    def receipt_adds_up(self, worker: SimWorker, receipt: dict[str, Any]) -> None:
        """Every token of a prompt has one origin; what was loaded is what the loads brought."""
        self.count("receipts")
        tokens, loads = receipt["tokens"], receipt.get("loads", ())
        loaded = sum(tokens.values()) - sum(tokens.get(name, 0) for name in (DEVICE, COMPUTED, UNSERVED))
        brought = [load["tokens"] for load in loads if load["ended"] == LOADED]
        is_right = not loaded or loaded in brought
        is_whole = sum(tokens.values()) == receipt["prompt_tokens"] and min(tokens.values(), default=1) > 0
        if not (is_right and is_whole):
            self.world.fail("receipt_adds_up", f"{worker.who} issued {receipt}")

    def forged_opens_nothing(self, load: Load) -> None:
        """6: nobody is asked for what an expired or forged handle stands for."""
        if load.request_id in self._forged and not load.refusal:
            self.world.fail("forged_opens_nothing", f"{load.request_id} is fetched: {load.handle}")

    def opens_once(self, request: SimRequest) -> None:
        """6: whoever presents it, a handle opens one load."""
        params = request.kv_transfer_params or {}
        handle = params.get(TRANSFER_KEY) or params[HANDLE_KEY]
        if handle in self._opened:
            self.world.fail("opens_once", f"{request.request_id} is not the first to be loaded by its handle")
        self._opened.add(handle)

    def bytes_are_right(self, node: SimNode, request: SimRequest, num_tokens: int, *, later: bool) -> None:
        """3: what is served is what the prompt's KV is, byte by byte."""
        if request.is_strange:
            return
        for worker in node.workers:
            wrong = worker.memory.difference(request.prompt, request.ids, num_tokens, later=later)
            if wrong:
                self.world.fail(
                    "bytes_are_right",
                    f"{request.request_id} at {worker.who} is not {'any more ' if later else ''}"
                    f"what it should be: {wrong}",
                )

    def found_once_and_in_time(self, worker: SimWorker, found: Found, owed: dict[str, list[float]]) -> None:
        """2, 4: every question is answered once, by its peer or by time."""
        name = found.request_id
        self.count("found by name" if found.num_tokens else "no answer" if found.error else "found nothing")
        self.each_once(worker, "found", name, owed)
        if name not in owed:
            return
        took_s = worker.awake_s - owed[name].pop(0)
        if not owed[name]:
            del owed[name]
        if took_s > worker.config.find_s + SLACK_S:
            self.world.fail("in_time", f"{worker.who} asked {took_s:.1f} s for {name}")

    def in_time(self, worker: SimWorker, owed: Owed) -> None:
        """4: every order ends by its deadline.

        The time in which the worker's process was stopped does not count.
        """
        config = worker.config
        if isinstance(owed.order, Load):
            bound = config.load_timeout_s + SLACK_S
        else:
            bound = config.lease_s + config.transfer_timeout_s + SLACK_S
            # Whoever would fetch may have been stopped meanwhile, and renews when it goes on.
            bound += self._longest_wait_s + max(one.stopped_s for one in self._books)
        took = worker.awake_s - owed.since
        if took > bound:
            self.world.fail(
                "in_time",
                f"{type(owed.order).__name__} of {owed.order.request_id} at {worker.who} took {took:.1f} s, "
                f"its bound is {bound:.1f} s",
            )

    def nothing_stands_still(self, waiting: dict[str, float]) -> None:
        """4: those who wait, each since then, wait for something that moves, and not for one another."""
        for name, since in waiting.items():
            still_s = self.world.now - max(self._moved_at, since)
            if still_s > STILL_S:
                self.world.fail(
                    "nothing_stands_still", f"{name} waits, and nothing moved for {still_s:.1f} s"
                )

    def drain_bound_s(self, node: SimNode) -> float:
        """How long a node that shall end may take until nobody waits for it."""
        extra = node.plan.extra
        return extra.drain_s + extra.transfer_timeout_s + extra.quarantine_s + SLACK_S

    def drained_in_time(self, node: SimNode) -> None:
        """4: a node that shall end holds nothing any more once its bound is over."""
        for worker in node.workers:
            if not (node.is_dead or worker.stopped_s or worker.is_drained):
                self.world.fail("drained_in_time", f"{worker.who} still holds requests")

    def within_bounds(self, worker: SimWorker) -> None:
        """4: queues and bytes under way stay within what is configured."""
        config, prefill, decode = worker.config, worker.prefill, worker.decode
        asked = sum([loading.admitted for loading in decode.loads.values()])
        sending = [one for one in prefill.sender.sendings.values() if one.in_flight]
        in_flight = sum([sum(one.in_flight.values()) for one in sending])
        fetches, expected = len(prefill.pending.fetches), len(prefill.book.expected)
        # A chunk and a calibration are one batch each, whatever their size; and each peer may have one.
        batch_bytes = max(worker.slot_bytes, worker.memory.scratch_bytes)
        most_bytes = config.max_inflight_bytes + batch_bytes * len({one.path.name for one in sending})
        for what, found, most in (
            ("loads at once", asked, config.max_loads),
            ("bytes under way", in_flight, most_bytes),
            ("fetches that wait", fetches, config.max_leases),
            ("prefills that are expected", expected, config.max_leases),
        ):
            if found > most:
                self.world.fail("within_bounds", f"{worker.who}: {found} {what}, the bound is {most}")

    def slots_add_up(self, worker: SimWorker) -> None:
        """5: a slot is free, or somebody has it."""
        for pool in (worker.landing, worker.send):
            free = [slot.state for slot in pool.slots].count(SlotState.FREE)
            if free != pool.free:
                self.world.fail(
                    "slots_add_up", f"{worker.who}: {pool.free} slots can be taken, {free} are free"
                )

    def slots_come_back(self, worker: SimWorker) -> None:
        """4: a slot is free again once what it was taken for is over and its memory must be quiescent.

        The time in which the worker's process was stopped does not count.
        """
        config, taken_since = worker.config, self._books[worker].slots
        bound = config.load_timeout_s + config.quarantine_s + SLACK_S
        for slot in (*worker.landing.slots, *worker.send.slots):
            if slot.state is SlotState.FREE:
                taken_since.pop(slot.address, None)
                continue
            taken = (slot.generation, worker.awake_s)
            generation, since = taken_since.setdefault(slot.address, taken)
            if generation != slot.generation:
                taken_since[slot.address] = taken
            elif taken[1] - since > bound:
                self.world.fail(
                    "in_time",
                    f"the slot of generation {generation} at {worker.who} is not free after "
                    f"{taken[1] - since:.1f} s, its bound is {bound:.1f} s",
                )

    def blocks_add_up(self, node: SimNode) -> None:
        """5: a block is free, or somebody holds it."""
        pool = node.pool
        if pool.held + pool.num_free != pool.total:
            self.world.fail(
                "blocks_add_up",
                f"{node.name}: {pool.held} blocks held, {pool.num_free} free, {pool.total} in all",
            )

    def no_exception(self, worker: SimWorker) -> None:
        """6: no thread meets an error of its own, and no record an event that is illegal in its state."""
        if self.exceptions.texts:
            self.world.fail("no_exception", f"{worker.who}: {self.exceptions.texts[0]}")
        elif worker.metrics.failures.labels("internal").value:
            self.world.fail("no_exception", f"{worker.who}: an internal error was counted")

    def idle(self, node: SimNode) -> None:
        """5: when all is over nothing is held, lent, owed or remembered."""
        remaining = ", ".join(
            f"{count} {name}" for name, count in left_at(node, self._books).items() if count
        )
        if remaining:
            self.world.fail("idle", f"{node.name} should be idle, and has {remaining}")

    def is_quiet(self, node: SimNode) -> bool:
        """Whether a node is idle already."""
        return not any(left_at(node, self._books).values())
