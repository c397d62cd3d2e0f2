"""D's part of a worker: fetches KV from peers, and reports loads that have ended.

Owned by the transfer thread. Each load is reported exactly once. Peers write to slots, never to D's blocks.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import ClassVar

import msgspec

from kvconnect.addresses import is_address
from kvconnect.decode.failure_log import FailureLog
from kvconnect.decode.finds import Finds
from kvconnect.decode.loads import LoadRecord, RankFetch, RankFetchState
from kvconnect.decode.peers import Peers, RankLink
from kvconnect.decode.rank_fetches import RankFetches
from kvconnect.decode.renewals import Renewals
from kvconnect.engine.lanes import Transport
from kvconnect.metrics import count_error
from kvconnect.outcome import Cause, Outcome, Reason
from kvconnect.peer.channel import Arrival, LinkLost
from kvconnect.peer.loss import LOSS_RULES, PeerLoss
from kvconnect.peer.messages import Accepted, CreditRequest, Landed, PrefixFound, Renewed, Welcome, Written
from kvconnect.peer.session import Ended, Event, Misused
from kvconnect.timeline import Moment
from kvconnect.transfer.link_reports import Transports, refusal
from kvconnect.transfer.orders import LetGo, Load, Orders, PeerKey, Results
from kvconnect.transfer.parts import AGAIN_S, Finished, Pace, TransferContext, always, carry_out_each

logger = logging.getLogger(__name__)

_MOST_OUTCOMES = 1024


class DecodeSide:
    """All loads of a worker, by request id."""

    name = "the loads"
    NOTHING: ClassVar = dict.fromkeys(("loads", "awaited", "peers"), 0)
    """The counts of ``state`` for a node without this part."""

    def __init__(self, context: TransferContext) -> None:
        self._config, self._local, self._timers = context.config, context.local, context.timers
        self._reports, self._metrics = context.reports, context.metrics
        self.loads: dict[str, LoadRecord] = {}
        self.outcomes: deque[Outcome] = deque(maxlen=_MOST_OUTCOMES)
        """The outcomes of the last loads, and on rank 0 of the last requests without a load."""
        self.peers = Peers(context, self._handle, self._peers_in_use)
        self.renewals = Renewals(context, self.peers)
        self.rank_fetches = RankFetches(context, self.peers)
        self.finds = Finds(context, self.peers, self.rank_fetches.path_over)
        self.bay = self.rank_fetches.bay
        self._by_peer: dict[PeerKey, dict[LoadRecord, None]] = {}
        self._queue: OrderedDict[LoadRecord, None] = OrderedDict()
        self._admitted = 0
        self._due: dict[LoadRecord, None] = {}
        self._transports = Transports(context.metrics, context.repeats)
        self._repeats, self._misused = context.repeats, context.misused
        self._failures = FailureLog(context, self._is_met)

    # Orders of the scheduler

    def carry_out(self, orders: Orders, finished: Mapping[int, Finished], now: float) -> None:
        """As ``PrefillSide.carry_out``."""
        metrics, keep, ask = self._metrics, self.renewals.keep, self.finds.ask
        # Every rank gets the orders: rank 0 looks prefixes up, and counts events of the scheduler half.
        is_first = self._local.introduction.rank == 0
        carry_out_each(
            metrics,
            ("load", orders.loads, lambda order: self.load(order, finished[orders.step], now)),
            ("let go", orders.let_go, lambda order: self.let_go(order, now)),
            ("await", orders.awaited, lambda order: keep(order, now)),
            ("abort", orders.aborted, self.abort),
            ("find", orders.finds * is_first, lambda order: ask(order, now)),
        )
        for outcome, num_tokens in orders.pulls * is_first:
            metrics.pulls.labels(outcome).inc()
            metrics.pulled_tokens.inc(num_tokens)
        self.outcomes.extend(orders.refused * is_first)

    def load(self, order: Load, is_unused: Callable[[], bool], now: float) -> None:
        """Begin the load of a request. A second load before the first has ended is dropped with an error.

        No byte is written to the request's blocks before ``is_unused`` returns true.
        """
        if order.request_id in self.loads:
            self._metrics.failures.labels("request_in_use").inc()
            logger.error(
                "internal error: request %s is not loaded, as a load of the same request id has not ended",
                order.request_id,
            )
            return
        key = order.peer
        if order.parks:
            # Rows that no copy reads.
            is_unused = always
        timer = self._timers.timer(lambda now: self._look_again(load, now))
        deadline = now + self._config.load_timeout_s
        load = LoadRecord(order, now, deadline, is_unused, self._touched, timer)
        timer.at(deadline)
        self.loads[order.request_id] = load
        self._queue[load] = None
        self._by_peer.setdefault(key, {})[load] = None
        self._metrics.timeline.note(Moment.LOAD_TAKEN, handle=order.handle, request_id=order.request_id)
        self.renewals.load(load, now)
        reason = load.error or order.refusal or self.peers.refusal(key, now)
        if reason:
            load.fail(reason)
        else:
            # Also for a load that waits for its turn: its lease is renewed meanwhile.
            self.peers.reach(key, now)

    def abort(self, request_id: str) -> None:
        """The client left: end the load, which is no failure. Reported once its blocks are quiescent."""
        if request_id in self.loads:
            self.loads[request_id].fail(Cause.ABORTED("the request was aborted"))

    def replace_weights(self, now: float) -> None:
        """D's weights were replaced: fail all loads, whose KV is of the old weights, and greet peers anew."""
        for load in self.loads.values():
            load.fail(Cause.REPLACED("the decode node's weights were replaced while it was being loaded"))
        # The loads' fetches are cancelled before peers are greeted anew.
        self._look_after_all(now)
        self.peers.greet_anew()

    def let_go(self, order: LetGo, now: float) -> None:
        """Release a handle on its peer: D will not fetch under it."""
        self.renewals.end(order.handle)
        self.peers.let_go(order.peer, order.handle, now)

    def _peers_in_use(self) -> set[PeerKey]:
        in_use = self.renewals.peers_in_use() | self.finds.peers_in_use()
        return in_use | {load.peer for load in self.loads.values()}

    # Frames

    def receive(self, arrival: Arrival, now: float) -> None:
        if isinstance(arrival, LinkLost):
            self._link_lost(arrival, now)
        elif (found := self.peers.links.get(arrival.link)) is not None:
            for event in found.session.receive(arrival.data, now):
                self._handle(found, event, now)
            self.peers.keep_time(found)

    def _link_lost(self, lost: LinkLost, now: float) -> None:
        """Take the loss of a connection."""
        link = self.peers.links.get(lost.link)
        if link is None:
            return
        if lost.reason:
            reason = Cause.OUT_OF_REACH(f"cannot talk to {link.address}: {lost.reason}")
        elif lost.loss is PeerLoss.PROCESS_GONE:
            reason = Cause.LOST(f"nothing listens at {link.address}, the prefill node is gone")
        else:
            reason = Cause.LOST(f"the connection to {link.address} was lost")
        self._lose(link, lost.loss, reason, now)

    def advance(self, now: float) -> bool:
        """Advance the loads that an event touched, and admit queued loads."""
        self.bay.advance()
        self._look_after_all(now)
        # Admitted after that, so that a load which ended makes room for the next one at once.
        self._admit(now)
        self._look_after_all(now)
        if self.finds.has_changed:
            self.finds.advance(now)
        self.peers.forget_idle()
        if self._failures.new:
            self._failures.write(now)
        self._metrics.loads.set(len(self.loads))
        self._metrics.loads_waiting.set(len(self._queue))
        return False

    def state(self) -> dict[str, int]:
        """Counts of loads and awaited handles, zero when idle, and of known peers."""
        return {"loads": len(self.loads), "awaited": len(self.renewals.awaited), "peers": len(self.peers)}

    def _touched(self, load: LoadRecord) -> None:
        self._due[load] = None

    def _look_again(self, load: LoadRecord, now: float) -> None:
        if now >= load.deadline:
            limit = f"{self._config.load_timeout_s:g} s, which is load_timeout_s"
            load.fail(Cause.TIMEOUT(f"it did not arrive within {limit}"))
        load.touch()

    def _look_after_all(self, now: float) -> None:
        """Advance the loads that were touched by an event."""
        due, self._due = self._due, {}
        for load in due:
            if self.loads.get(load.order.request_id) is not load:
                # A kernel may still run for a load that has ended.
                continue
            try:
                self._move_on(load, now)
            except Exception as error:
                count_error(self._metrics, error, f"request {load.order.request_id}")
                load.timer.by(now + AGAIN_S)

    def _move_on(self, load: LoadRecord, now: float) -> None:
        self.rank_fetches.move_on(load, now)
        if load.admitted and not load.error and load.is_to_ask:
            self._ask(load, now)
        is_kept = load.order.parks and load.error and load.error.cause is not Cause.ABORTED
        if load.error and load.handle and not load.given_back and not is_kept:
            # Released, so that the peer need not hold the blocks until the lease expires. What could not be
            # parked waits there.
            load.given_back = True
            self.peers.let_go(load.peer, load.handle, now)
        if load.over:
            self._finish(load, now)

    @property
    def has_work(self) -> bool:
        """``advance`` has work in a turn without an event."""
        return bool(self._due) or self.bay.busy

    @property
    def pace(self) -> Pace:
        if self._due:
            return Pace.DUE
        # Landed chunks wait for the device, or a peer may be writing with an engine that must be polled.
        must_poll = self._local.engine.capabilities.target_must_poll and self.rank_fetches.is_any_owed
        return Pace.BUSY if self.bay.busy or must_poll else Pace.IDLE

    # Peers

    def _handle(self, link: RankLink, event: Event, now: float) -> None:
        match event:
            case Welcome():
                self._met(link, event, now)
            case Accepted() | Landed() | CreditRequest() | Written():
                is_served = isinstance(event, Accepted | Landed) or (isinstance(event, Written) and event.ok)
                if is_served and link.found is None:
                    self._judge(link, refusal(self._config, None, "decode"), now)
                self.rank_fetches.receive(event, link.name, now)
            case Transport():
                self._reached(link, event, now)
            case Renewed():
                self.renewals.renewed(link, event, now)
            case PrefixFound():
                self.finds.answered(link, event, now)
            case Misused(reason=reason):
                self._misused(link, reason.text)
            case Ended(reason=reason, loss=loss):
                self._lose(link, loss, reason, now)
        self.peers.flush(link)

    def _met(self, link: RankLink, welcome: Welcome, now: float) -> None:
        reason = self.peers.meet(link, welcome, now)
        if reason:
            self._lose(link, PeerLoss.UNUSABLE, reason, now)
            return
        peer = link.peer
        peer.is_whole = peer.is_whole or link.rank == 0
        self._repeats.reached(peer.key)
        if not link.was_met:
            link.was_met = True
            logger.info("%s is met: KV comes over %s", link, self._local.engine.capabilities)
        self._end_writes(PeerLoss.OTHER_INCARNATION, link, now, welcome.introduction.incarnation)
        self.renewals.met(link.peer.key, now)
        self.finds.met(link, now)
        self.finds.changed()
        for load in self._by_peer.get(link.peer.key, ()):
            if load.is_to_ask:
                load.touch()

    def _reached(self, link: RankLink, found: Transport, now: float) -> None:
        """A peer reports the lane of its link, which either side's settings may refuse for a while."""
        theirs, is_first = link.session.peer, link.found is None
        if theirs is None:
            return
        link.found = found
        report = self._transports.met if is_first else self._transports.measured
        report(str(link), found)
        by_peer = None
        if found.refusal:
            by_peer = Cause.LANE_REFUSED(found.refusal)
        self._judge(link, by_peer or refusal(self._config, found, "decode"), now)
        self.finds.changed()

    def _judge(self, link: RankLink, reason: Reason | None, now: float) -> None:
        """Accept the lane of a peer's link or, with a reason, refuse it and fail the peer's loads."""
        peer = link.peer
        if link.refusal and peer.lanes.refusal(now):
            # The link was refused, and D has fetched nothing since: the message concerns an earlier fetch.
            return
        if reason:
            for load in self._by_peer.get(peer.key, ()):
                if load.admitted:
                    load.fail(reason)
            # The loads' fetches are cancelled before the peer is greeted anew.
            self._look_after_all(now)
        self.peers.judge(link, reason, now)

    def _lose(self, link: RankLink, loss: PeerLoss, reason: Reason, now: float) -> None:
        """A connection has ended: its loads fail or are asked for again, by the rule in ``LOSS_RULES``."""
        peer, rank, rule = link.peer, link.rank, LOSS_RULES[loss]
        if not rule.asks_again:
            self._failures.lost(peer.key, reason, was_whole=peer.is_whole)
            peer.is_whole = False
        self.peers.drop(link, now)
        self.finds.lost(link.name, reason)
        self.finds.changed()
        peer.last_loss = now, loss, reason
        if rule.is_out_of_reach or link.session.peer is None:
            self.peers.failed(peer, reason, now)
            self.renewals.failed(peer.key, reason)
        elif rule.asks_again:
            # The peer dropped this connection, having too many peers: D reconnects only to fetch again.
            peer.was_met = False
        loads = [load for load in self._by_peer.get(peer.key, ()) if load.admitted]
        for load in loads:
            fetch = load.fetches.get(rank)
            if fetch is not None and fetch.state is RankFetchState.MEETING:
                load.fail(reason)
        if self.rank_fetches.lose(link.name, loss, reason, now):
            self.peers.reach(peer.key, now)
        self._end_writes(loss, link, now)
        if rank == 0 and 0 not in peer.links:
            # Only rank 0 knows how many ranks there are, and where: ranks not asked so far cannot be asked.
            for load in loads:
                if load.is_to_ask and not load.error:
                    load.fail(reason)

    def _is_met(self, key: PeerKey) -> bool:
        peer = self.peers.peers.get(key)
        return peer is not None and peer.is_ready

    def _end_writes(self, loss: PeerLoss, link: RankLink, now: float, incarnation: str = "") -> None:
        """Shorten the quarantine of slots of past connections to a rank, except those to ``incarnation``."""
        writes_end_s = LOSS_RULES[loss].writes_end_s
        # Another process at an address proves that the one before it ended; a name may have many addresses.
        if writes_end_s is not None and (not incarnation or is_address(link.peer.key[1])):
            self.bay.hasten(link, incarnation, now + writes_end_s)

    # Loads

    def _admit(self, now: float) -> None:
        """Admit queued loads, up to ``max_loads`` at a time: D meets their peers, then fetches."""
        while self._queue and self._admitted < self._config.max_loads:
            load, _ = self._queue.popitem(last=False)
            if load.error:
                continue
            if reason := self.peers.refusal(load.peer, now):
                load.fail(reason)
                continue
            self._admitted += 1
            load.admitted = True
            load.touch()
            self.peers.reach(load.peer, now)

    def _ask(self, load: LoadRecord, now: float) -> None:
        peer = self.peers.peers.get(load.peer)
        if peer is None or not peer.is_ready:
            return
        if not load.fetches:
            load.fetches = {rank: RankFetch(load, rank) for rank in peer.partners}
            if load.handle and load.order.prefix is None:
                self.peers.release_unused(peer, load.handle, now)
        for fetch in load.fetches.values():
            link = self.peers.connect_rank(peer, fetch.rank, now)
            is_to_ask = fetch.state is RankFetchState.MEETING and not fetch.is_unpacking
            if is_to_ask and link is not None:
                load.is_ragged |= link.is_ragged
                self.rank_fetches.ask(fetch, link, now)
            if load.error:
                return

    def _finish(self, load: LoadRecord, now: float) -> None:
        request_id = load.order.request_id
        del self.loads[request_id]
        self._queue.pop(load, None)
        self._admitted -= load.admitted
        of_peer = self._by_peer[load.peer]
        del of_peer[load]
        if not of_peer:
            del self._by_peer[load.peer]
        load.timer.cancel()
        self.renewals.loaded(load)
        engine_id, host, port = load.peer
        failed = "aborted" if load.error is not None and load.error.cause is Cause.ABORTED else "failed"
        label = "parked" if load.order.parks and not load.error else "ok" if load.error is None else failed
        outcome = Outcome(
            request_id,
            engine_id,
            (host, port),
            "lease" if load.order.prefix is None else "name",
            load.order.num_tokens,
            sum(total_bytes for total_bytes, _ in load.moved.values()),
            now - load.ordered_at,
            "+".join(sorted(load.moved)),
            load.error,
            on_device=load.on_device and load.error is None and load.order.prefix is not None,
        )
        if load.order.wants_outcome:
            digest = load.digest() if load.error is None else ""
            outcome = msgspec.structs.replace(outcome, identities=self._identities(load.peer), digest=digest)
        outcomes = (outcome,) if load.order.wants_outcome else ()
        try:
            self._count(outcome, load, label)
            self._metrics.loads.set(len(self.loads))
        finally:
            # After the count, so that the receiver of the report finds the load counted; and also after an
            # error: a load without a report would leave its request waiting for ever.
            if load.order.parks and self._local.parked is not None:
                self._reports.add(Results(outcomes=outcomes))
                self._local.parked.end(load.order.parks, ok=load.error is None)
            else:
                self._reports.add(
                    Results(
                        received=(request_id,),
                        failed={} if load.error is None else {request_id: load.error},
                        ragged=(request_id,) if load.is_ragged else (),
                        attachments={request_id: load.attachment} if load.attachment else {},
                        outcomes=outcomes,
                    )
                )
            self._metrics.timeline.note(
                Moment.REPORTED, not load.error, handle=load.order.handle, request_id=request_id
            )
        logger.debug("%s", outcome)
        if (outcome.reason is not None or self._repeats.logged) and not load.order.parks:
            self._failures.ended(load.peer, outcome)

    def _identities(self, key: PeerKey) -> tuple[str, str]:
        """The digests of what this node's KV and a peer's depend on; empty of a peer that is not met."""
        peer = self.peers.peers.get(key)
        theirs = None if peer is None or 0 not in peer.links else peer.links[0].session.peer
        ours = self._local.introduction.meaning.identity
        return ours.digest, "" if theirs is None else theirs.meaning.identity.digest

    def _count(self, outcome: Outcome, load: LoadRecord, label: str) -> None:
        """Count a load that has ended."""
        metrics, reason = self._metrics, outcome.reason
        self.outcomes.append(outcome)
        metrics.transfers.labels("received", label).inc()
        if reason is not None:
            if load.order.parks and reason.cause is not Cause.ABORTED:
                # No request fails with it.
                metrics.failures.labels("park_failed").inc()
                logger.info("%s; it waits for blocks of this node as before", outcome)
            elif reason.cause is not Cause.ABORTED:
                metrics.failures.labels(reason.cause.value).inc()
            return
        for lane, (total_bytes, copies) in load.moved.items():
            metrics.transfer_bytes.labels("received", lane).inc(total_bytes)
            metrics.copies.labels("received").inc(copies)
        metrics.transfer_seconds.labels("received").inc(load.seconds)
        metrics.load_seconds.observe(outcome.seconds)
