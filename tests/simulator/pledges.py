"""What nodes said that they pinned for sessions, and whether that is true at every step of their schedulers.

A pledge is made of the answers of a node and the plain rules of what a hit needs. What the connector's own
books say is looked at for what is pinned without reason, and for quotas.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvconnect.offload.index.session_pins import MOST_PINNED, Pin
from kvconnect.offload.scheduler.offload_scheduler import OffloadScheduler
from kvconnect.offload.scheduler.sessions import MOST_TTL_S
from kvconnect.offload.tier import HOST, Content
from kvconnect.plan.blocks import BlockIdsByGroup
from kvconnect.transfer.orders import OffloadOrders
from kvconnect.transfer.stack import RequestView
from tests.simulator.memory import WINDOW_TOKENS, Prompt, names_of
from tests.simulator.request import SimRequest
from tests.simulator.scenario import SessionPlan

if TYPE_CHECKING:
    from tests.simulator.node import SimNode

Session = tuple[str, str]
_MOST_PINS = 16
"""Of one session; what is pinned beyond that takes the place of others."""
_LONG_S = 3 * MOST_TTL_S


@dataclass(eq=False)
class Pledge:
    """A prefix that is pinned, by what its contents are called, until then.

    ``line`` are the names of all of its blocks. ``may_be_below``: it was asked to go to disk.
    """

    session: Session
    contents: frozenset[Content]
    line: tuple[bytes, ...]
    until: float
    may_be_below: bool = False


@dataclass(eq=False)
class Turn:
    """A request that runs and asks for something.

    ``pledged`` and ``moved`` are the sessions that had pledges when it came, and those of which something was
    released or demoted since.
    """

    plan: SessionPlan
    pledged: frozenset[Session]
    released: set[Session]
    demoted: set[Session]


class Pledges:
    """Of one node, from its start to its end."""

    def __init__(self, node: SimNode, half: OffloadScheduler) -> None:
        assert node.plan.keeps is not None
        self._node, self._half, self._world, self._keeps = node, half, node.world, node.plan.keeps
        self._pledges: list[Pledge] = []
        self._turns: dict[str, Turn] = {}
        # Until when a session may have pins at all: what is continued may be given a shorter time.
        self._latest: defaultdict[Session, float] = defaultdict(lambda: -math.inf)
        self._on_disk: set[Content] = set()
        self._was_pinned = False

    # What happens

    def arrived(self, request: SimRequest) -> None:
        if request.session is not None:
            pledged = frozenset(pledge.session for pledge in self._live(self._world.now))
            asked = request.session
            self._world.note(
                self._node.name, "is asked", request.request_id, asked.tenant, asked.session_id, asked.actions
            )
            self._turns[request.request_id] = Turn(request.session, pledged, set(), set())

    def ended(self, request: SimRequest, answer: Mapping[str, Any] | None) -> None:
        """A request has ended, and this is said of its hints."""
        turn = self._turns.pop(request.request_id, None)
        if turn is None or turn.plan.is_garbage:
            if (turn is None) != (answer is None) or (answer is not None and not answer.get("error")):
                self._fail("hints_are_answered", f"{request.request_id} is told {answer}")
            return
        asked, said = turn.plan.actions, (answer or {}).get("actions", ())
        if [(one["action_id"], one["action_type"]) for one in said] != [
            (f"a{number}", kind) for number, (kind, _) in enumerate(asked)
        ]:
            self._fail("hints_are_answered", f"{request.request_id} is told {answer}")
            return
        for (kind, payload), one in zip(asked, said, strict=True):
            self._node.checks.count(f"sessions: {kind} {one['outcome']}")
            self._world.note(
                self._node.name, "answers", request.request_id, *turn.plan.session_of(payload), one
            )
            if problem := self._problem(request, turn, kind, payload, one):
                self._fail(
                    "outcomes_are_true", f"{request.request_id} asked to {kind} {payload}, {problem}: {one}"
                )

    def overwritten(self, contents: Set[Content]) -> None:
        """The stack overwrote blocks before what was in them could be stored: that was no promise of ours."""
        for pledge in self._pledges:
            pledge.contents -= contents

    def looked(self, orders: OffloadOrders, now: float) -> None:
        """The scheduler half did a step, with these orders."""
        for group, name, is_pinned in orders.disk_pins:
            (self._on_disk.add if is_pinned else self._on_disk.discard)((group, name))
        self._pledges = self._live(now)
        pins = [pin for every in self._half.host.pins._sessions.values() for pin in every]
        if not (pins or self._pledges or self._was_pinned):
            return
        self._was_pinned = bool(pins)
        self._pledges_are_kept()
        self._pins_have_reasons(pins, now)
        self._quotas_hold(pins)

    def over(self) -> None:
        """All is over, and much time has passed: nothing is pinned any more."""
        now = self._world.now + _LONG_S
        self._half._clock = lambda: now
        self._half.build_orders()
        counts = {place: count for place, count in self._half.host.pins.counts().items() if count}
        if counts or self._on_disk or self._pinned_rows():
            self._fail("pins_end", f"when all is over there are pins: {counts}, {len(self._on_disk)} on disk")

    # What was said

    def _problem(
        self, request: SimRequest, turn: Turn, kind: str, payload: Mapping[str, Any], said: Mapping[str, Any]
    ) -> str:
        """What is not true of an answer, or nothing. Notes what it promises."""
        outcome, session = said["outcome"], turn.plan.session_of(dict(payload))
        if outcome not in ("accepted", "clipped", "rejected", "expired"):
            return "which is no outcome"
        if outcome != "accepted" and not said.get("reason"):
            return "without a reason"
        if payload.get("ttl_s", 1.0) <= 0 or kind == "explode":
            return "" if outcome == "rejected" else "which nobody can"
        match kind:
            case "pin":
                return self._pinned(request, turn, session, payload, said)
            case "release":
                return self._released(turn, session, outcome)
            case "demote":
                for pledge in self._pledges:
                    pledge.may_be_below |= pledge.session == session
                for other in self._turns.values():
                    other.demoted.add(session)
                turn.demoted.add(session)
                if outcome == "expired" and self._is_pledged(session):
                    return "and there is a pledge"
                if not self._keeps.disk_bytes and outcome != "rejected":
                    return "and there is no disk"
            case "prefetch" if payload.get("of") == "prompt":
                if outcome == "expired" or said.get("num_tokens", 0) > request.prompt.num_tokens:
                    return f"of a prompt of {request.prompt.num_tokens} tokens"
                if payload.get("to") == "disk" and outcome != "rejected":
                    return "which nobody can"
            case "prefetch":
                if outcome == "expired" and session in turn.pledged:
                    return "and there was a pledge"
                if outcome == "accepted" and session not in turn.demoted | turn.released:
                    for pledge in self._pledges:
                        pledge.may_be_below &= pledge.session != session
        return ""

    def _pinned(
        self,
        request: SimRequest,
        turn: Turn,
        session: Session,
        payload: Mapping[str, Any],
        said: Mapping[str, Any],
    ) -> str:
        outcome, asked_s = said["outcome"], payload["ttl_s"]
        is_done = request.num_generated_tokens >= request.max_tokens
        if outcome == "rejected":
            return ""
        if outcome == "expired":
            others = [pledge for pledge in self._pledges if pledge.session == session]
            # One that left may never have been looked at.
            may_be = session in turn.released or not is_done or len(others) >= _MOST_PINS
            return "" if may_be else "and nobody released it"
        block, num_tokens = self._node.plan.shape.block_tokens, said["num_tokens"]
        whole = (request.num_tokens - 1) // block * block
        if (
            num_tokens <= 0
            or num_tokens % block
            or num_tokens > whole
            or said["ttl_s"] != min(asked_s, MOST_TTL_S)
        ):
            return f"of {whole} tokens at most"
        if outcome == "accepted" and ((is_done and num_tokens < whole) or asked_s > MOST_TTL_S):
            return f"which is not all of {whole} tokens"
        prompt = request.prompt.moved(self._keeps.hashing)
        line = names_of(prompt, num_tokens, block)
        every = names_of(prompt, request.num_tokens, block)
        # What the prompt goes on from has the time of the new pin.
        self._pledges = [
            old for old in self._pledges if old.session != session or old.line != every[: len(old.line)]
        ]
        until = self._world.now + said["ttl_s"]
        self._pledges.append(Pledge(session, self._needed(prompt, num_tokens), line, until))
        self._latest[session] = max(self._latest[session], until)
        return ""

    def _released(self, turn: Turn, session: Session, outcome: str) -> str:
        if outcome == "expired" and self._is_pledged(session):
            return "and there is a pledge"
        if outcome == "accepted" and self._latest[session] == -math.inf and not self._running(session, turn):
            return "and nothing was pinned"
        self._pledges = [pledge for pledge in self._pledges if pledge.session != session]
        self._latest[session] = -math.inf
        for other in (turn, *self._turns.values()):
            other.released.add(session)
        return ""

    def _needed(self, prompt: Prompt, num_tokens: int) -> frozenset[Content]:
        """What a request needs that begins after so many tokens of a prompt."""
        block, found = self._node.plan.shape.block_tokens, list[Content]()
        names = names_of(prompt, num_tokens, block)
        for group, (kind, _) in enumerate(self._node.plan.model.kinds):
            first = 0
            if kind == "window":
                first = max(0, num_tokens - WINDOW_TOKENS + 1) // block
            elif kind == "state":
                first = len(names) - 1
            found += [(group, name) for name in names[first:]]
        return frozenset(found)

    # The invariants

    def _pledges_are_kept(self) -> None:
        """8: what was pinned is there until its time is over, whatever others want."""
        index, jobs = self._half.host.index, self._half.host.jobs
        for pledge in self._pledges:
            for group in {group for group, _ in pledge.contents}:
                names = [name for known, name in pledge.contents if known == group]
                is_here = index.has(group, names)
                gone = {name for name, here in zip(names, is_here, strict=True) if not here}
                if gone and pledge.may_be_below:
                    gone -= jobs.being_kept(group)
                    gone = {name for name in gone if not self._is_on_disk((group, name))}
                if gone:
                    self._fail(
                        "pins_are_kept", f"session {pledge.session} has lost {sorted(gone)} of {group}"
                    )

    def _pins_have_reasons(self, pins: Sequence[Pin], now: float) -> None:
        """8: what is pinned is so for a request that runs, or for a promised time that is not over."""
        held: defaultdict[int, set[bytes]] = defaultdict(set)
        running: defaultdict[Session, int] = defaultdict(int)
        for pin in pins:
            session = pin.tenant, pin.session
            if pin.deadline == math.inf:
                running[session] += 1
            elif not now < pin.deadline <= self._latest[session]:
                self._fail("pins_end", f"session {session} is pinned, and it was promised nothing for now")
            for (tier, group), names in pin.held.items():
                if tier == HOST:
                    held[group].update(names)
        for session, count in running.items():
            if count > self._running(session):
                self._fail("pins_end", f"session {session} has {count} pins of requests that do not run")
        wanted = {(group, name) for group, names in held.items() for name in names}
        ledgers = self._half.host.pins._ledgers.items()
        counted = {(group, name) for (tier, group), one in ledgers if tier == HOST for name in one.all}
        if odd := sorted((wanted ^ counted) | (wanted - self._pinned_rows())):
            self._fail("pins_end", f"rows are pinned, or are not, for no reason: {odd}")

    def _quotas_hold(self, pins: Sequence[Pin]) -> None:
        """8: no tenant has more than its part, and none all together more than three quarters."""
        limits, share = self._half.host.plan.limits, self._keeps.pin_quota
        by_tenant: defaultdict[tuple[str, int], set[bytes]] = defaultdict(set)
        for pin in pins:
            for (tier, group), names in pin.held.items():
                if tier == HOST:
                    by_tenant[pin.tenant, group].update(names)
        for pledge in self._pledges:
            for group, name in pledge.contents if not pledge.may_be_below else ():
                by_tenant[pledge.session[0], group].add(name)
        every: defaultdict[int, set[bytes]] = defaultdict(set)
        for (tenant, group), contents in by_tenant.items():
            every[group] |= contents
            if len(contents) > limits[group] * share:
                text = f"tenant {tenant!r} has pinned {len(contents)} of {limits[group]} rows of {group}"
                self._fail("quotas_hold", f"{text}, its part is {share}")
        for group, contents in every.items():
            if len(contents) > limits[group] * MOST_PINNED:
                self._fail("quotas_hold", f"{len(contents)} of {limits[group]} rows of {group} are pinned")

    def _is_on_disk(self, content: Content) -> bool:
        disks = [worker.tiers.disk for worker in self._node.workers if worker.tiers is not None]
        return all(disk is not None and content in disk.contents for disk in disks)

    def _pinned_rows(self) -> set[Content]:
        return {
            rows.content[row]
            for rows in self._half.host.index.classes
            for row, pins in enumerate(rows.pins)
            if pins
        }

    def _live(self, now: float) -> list[Pledge]:
        return [pledge for pledge in self._pledges if pledge.until > now]

    def _is_pledged(self, session: Session) -> bool:
        return any(pledge.session == session for pledge in self._live(self._world.now))

    def _running(self, session: Session, *more: Turn) -> int:
        """How many requests that run want to pin something for a session."""
        return sum(
            any(
                kind == "pin" and turn.plan.session_of(payload) == session
                for kind, payload in turn.plan.actions
            )
            for turn in (*more, *self._turns.values())
        )

    def _fail(self, invariant: str, text: str) -> None:
        self._world.fail(invariant, f"{self._node.name}: {text}")


class WatchedOffload(OffloadScheduler):
    """The scheduler half of an offload, whose answers are compared with what it does."""

    pledges: Pledges

    def watch(self, node: SimNode) -> WatchedOffload:
        """From now on."""
        self.pledges = Pledges(node, self)
        return self

    def new_request(self, request: RequestView, *, reads: bool = True, writes: bool = True) -> None:
        super().new_request(request, reads=reads, writes=writes)
        assert isinstance(request, SimRequest)
        self.pledges.arrived(request)

    def request_finished(self, request: RequestView, block_ids: BlockIdsByGroup) -> dict[str, Any] | None:
        answer = super().request_finished(request, block_ids)
        assert isinstance(request, SimRequest)
        self.pledges.ended(request, answer)
        return answer

    def overwritten(self, block_ids: Collection[int]) -> None:
        before = self._unordered()
        super().overwritten(block_ids)
        self.pledges.overwritten(before - self._unordered())

    def _unordered(self) -> set[Content]:
        """What is to be stored with the next orders."""
        return {(group, name) for group, batch in self._stores._batches.items() for name in batch}

    def build_orders(self) -> OffloadOrders:
        orders = super().build_orders()
        self.pledges.looked(orders, self._clock())
        return orders
