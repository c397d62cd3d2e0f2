"""One seed from its scenario to its end, what came of it, and many seeds in several processes."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import multiprocessing
import random
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from kvconnect.peer.messages import CreditGrant, Fetch, Hello, Welcome
from tests.simulator.checks import Checks
from tests.simulator.clients import Client, Host, Thief
from tests.simulator.draw import LEAVERS, draw_scenario
from tests.simulator.network import Network, read_frame
from tests.simulator.scenario import FAULTS_S, FaultPlan, Scenario
from tests.simulator.stranger import Scribbler
from tests.simulator.tiers import nothing_stays_pinned
from tests.simulator.worker import SimWorker
from tests.simulator.world import START_S, Violation, World

_CARD = re.compile(r"/[0-9a-f]{12}\b")
"""What tells two cards of an engine apart in its name at a peer: made of addresses and chance."""


def format_event(event: Sequence[object]) -> str:
    """One line: when, who, what."""
    time, who, what, *details = event
    assert isinstance(time, float)
    if what == "says":
        link, data = details
        assert isinstance(link, str)
        assert isinstance(data, bytes)
        details = [f"to {link}:", _describe(link, data)]
    words = " ".join(str(detail) for detail in details)
    return _CARD.sub("/card", f"{time - START_S:10.4f}  {who:<10} {what} {words}".rstrip())


def _describe(link: str, data: bytes) -> str:
    message = read_frame(data, to_decode=link.startswith("in:"))
    name = type(message).__name__
    match message:
        case Hello(introduction=who) | Welcome(introduction=who):
            return f"{name} {who.engine_id}/{who.rank} {who.incarnation}"
        case Fetch():
            return (
                f"Fetch {message.transfer_id} {message.handle} of {message.num_tokens} tokens, "
                f"{len(message.chunks)} chunks, {_granted(message)}, {message.timeout_s:.3f} s"
            )
        case CreditGrant():
            return f"CreditGrant {message.transfer_id}: {_granted(message)}"
    fields = [f"{key}={value}" for key, value in msgspec.structs.asdict(message).items()]
    return f"{name} {' '.join(fields)}"


def _granted(message: Fetch | CreditGrant) -> str:
    """Grants without their addresses, which differ between processes."""
    return f"slots {[grant.generation for grant in message.grants]}"


_MOST_EVENTS = 100_000
_LOOK_S = 1.0

logger = logging.getLogger("kvconnect")


@dataclass
class Outcome:
    """What came of a seed. ``invariant`` is empty if all hold."""

    seed: int
    invariant: str = ""
    text: str = ""
    scenario: dict[str, object] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    trace: list[tuple[object, ...]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0


class Run:
    """A scenario on its clock."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.scenario: Scenario = draw_scenario(seed, self.world.random)
        extra = self.scenario.nodes[0].extra
        self.network = Network(self.world, self.scenario.weather)
        # A request may wait for blocks on D, and a stranger may renew, for as long as that is possible.
        self.checks = Checks(self.world, max(extra.load_timeout_s, extra.lease_max_s))
        if self.scenario.has_stranger:
            self.checks.scribbler = Scribbler(self.world, random.Random(f"{seed} scribbles"))
        self.hosts = {plan.host: Host(self.network, self.checks, plan) for plan in self.scenario.nodes}
        self.clients = [Client(self.world, self.hosts, plan) for plan in self.scenario.requests]
        for client in self.clients:
            if client.plan.turn_of is not None:
                client.turn_of = self.clients[client.plan.turn_of]
        if (handles := self.scenario.handles) is not None:
            self.clients += [
                Thief(self.world, self.hosts, plan, self.clients[plan.number], number, handles.secret)
                for number, plan in enumerate(handles.replays)
            ]
        for fault in self.scenario.faults:
            self.world.after(fault.start_s, functools.partial(self._begin, fault))
        self.world.after(FAULTS_S, self._heal)

    def _begin(self, fault: FaultPlan) -> None:
        if not fault.aim:
            self._happen(fault)
            return
        for worker in self.hosts[fault.aim].node.workers:
            worker.engine.armed = functools.partial(self._happen, fault)

    def _happen(self, fault: FaultPlan) -> None:
        host, world = self.hosts[fault.host], self.world
        world.note("fault", fault.kind, fault.host, fault.other, fault.lasts_s)
        match fault.kind:
            case "cuts":
                ways = [way for way in self.network.connections if way.up]
                if ways:
                    self.network.cut(world.random.choice(ways))
            case "partitions":
                self.network.part(fault.host, fault.other)
                world.after(fault.lasts_s, lambda: self.network.join(fault.host, fault.other))
            case "stops":
                host.stop()
                world.after(fault.lasts_s, host.go_on)
            case "kills":
                host.kill()
                world.after(fault.lasts_s, host.start)
            case "drains":
                host.drain()
                world.after(self.checks.drain_bound_s(host.node) + fault.lasts_s, host.kill)
                world.after(self.checks.drain_bound_s(host.node) + fault.lasts_s + 0.1, host.start)
            case "stalls":
                host.node.stall(fault.lasts_s)

    def _heal(self) -> None:
        """Everything works again from now on."""
        self.world.note("fault", "all is well")
        self.scenario.weather.slow = 0.0
        for plan in self.scenario.nodes:
            faults = plan.engine_faults
            faults.stall = faults.fail = faults.busy = faults.cut = faults.corrupt = 0.0

    def run(self) -> None:
        """Until all is over.

        Raises:
            Violation: an invariant does not hold.
        """
        world, extra = self.world, self.scenario.nodes[0].extra
        longest = max((fault.start_s + fault.lasts_s for fault in self.scenario.faults), default=0.0)
        lasts_s = max(FAULTS_S, longest) + 2 * (extra.lease_s + extra.load_timeout_s + extra.quarantine_s)
        # Where P has room for one prompt only, each may have to wait for the lease of the one before.
        lasts_s += 30.0 + len(self.clients) * extra.lease_max_s
        while world.run(world.now + _LOOK_S, _MOST_EVENTS) and world.now < START_S + lasts_s:
            # What is held for a client that left before D knew of it waits for its lease.
            if not self.scenario.kinds:
                self._check_motion()
            if world.now > START_S + longest and self._is_idle():
                break
        for client in self.clients:
            if not client.is_over:
                raise Violation("all_answered", f"client {client.name} has no answer")
        for host in self.hosts.values():
            self.checks.idle(host.node)
            nothing_stays_pinned(host.node)
        if world.violation is not None:
            raise world.violation
        if not set(self.scenario.kinds) - {LEAVERS}:
            self._check_success()

    def _is_idle(self) -> bool:
        is_over = all(client.is_over for client in self.clients)
        return is_over and all(self.checks.is_quiet(host.node) for host in self.hosts.values())

    def _check_motion(self) -> None:
        """Safety alone would be easy, and so would be to wait until time is over."""
        waiting = {client.name: client.asks_at for client in self.clients if not client.is_over}
        self.checks.nothing_stands_still(waiting)

    def _check_success(self) -> None:
        """Where nothing goes wrong nothing fails, but for clients that left: safety alone would be easy."""
        for client in self.clients:
            if client.outcome == "left":
                continue
            if not client.is_forged and set(client.outcome.split(",")) - {"done", ""}:
                raise Violation("success", f"client {client.name}: {client.outcome}")
            for name, why in self.checks.failed.items():
                if name.startswith(f"{client.name}-"):
                    raise Violation("success", f"the load of {name} failed: {why}")

    def end(self) -> None:
        """Give back what outlives a run."""
        if self.checks.scribbler is not None:
            self.checks.count("stray writes", self.checks.scribbler.written)
        for host in self.hosts.values():
            for node in (*host.past, host.node):
                for worker in node.workers:
                    self._count(worker)
                    worker.engine.close()

    def _count(self, worker: SimWorker) -> None:
        """Add a worker's own numbers to what is known of the run: they show what it went through."""
        metrics = worker.metrics
        for family in (metrics.failures, metrics.transfers, metrics.copies, metrics.pulls):
            for labels, value in family.values().items():
                self.checks.count(f"{family.family.name}: {', '.join(labels)}", int(value))
        self.checks.count("streamed", int(metrics.streamed.value))


def run_seed(seed: int) -> Outcome:
    """Run one seed. Nothing of it depends on anything else."""
    before = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    run = Run(seed)
    logger.addHandler(run.checks.exceptions)
    outcome = Outcome(seed)
    try:
        run.run()
    except Violation as violation:
        outcome.invariant, outcome.text = violation.invariant, violation.text
    except Exception as error:
        # What leaves a hook or a step ends a thread of the serving stack.
        outcome.invariant = "no_exception"
        outcome.text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        logger.removeHandler(run.checks.exceptions)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        run.end()
    outcome.scenario = run.scenario.describe()
    outcome.counts, outcome.reasons = run.checks.counts, run.checks.reasons
    answers = ",".join(client.outcome for client in run.clients if client.outcome)
    outcome.counts.update(f"clients {answer}" for answer in answers.split(",") if answer)
    outcome.trace, outcome.steps = run.world.trace, run.world.steps
    outcome.seconds = run.world.now - START_S
    return outcome


_SEEDS_AT_ONCE = 20


@dataclass
class Summary:
    """Sums over seeds. ``violations`` are those in which an invariant does not hold."""

    seeds: int = 0
    steps: int = 0
    simulated_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    violations: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.steps += outcome.steps
        self.simulated_s += outcome.seconds
        self.counts.update(outcome.counts)
        self.reasons.update(outcome.reasons)
        if outcome.invariant:
            self.violations.append(outcome)


def run_seeds(first_seed: int, seeds: int, jobs: int) -> Iterator[Outcome]:
    """The outcomes of so many seeds, without their traces; with several jobs, in no certain order."""
    numbers = range(first_seed, first_seed + seeds)
    if jobs <= 1:
        _prepare()
        for seed in numbers:
            yield from _run_part([seed])
        return
    # Forked children would share the parent's torch threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, _prepare) as pool:
        parts = [numbers[start : start + _SEEDS_AT_ONCE] for start in range(0, seeds, _SEEDS_AT_ONCE)]
        yield from itertools.chain.from_iterable(pool.imap_unordered(_run_part, parts))


def _prepare() -> None:
    torch.set_num_threads(1)
    # To look through all that was imported is most of what a collection takes.
    gc.collect()
    gc.freeze()


def _run_part(seeds: Iterable[int]) -> list[Outcome]:
    return [replace(run_seed(seed), trace=[]) for seed in seeds]
