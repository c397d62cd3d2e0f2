"""The legs of D's loads: what each rank of a peer was asked for, and what became of it.

Owned by the mover thread. A leg is over only when nothing of it can touch memory any more; what could
not be proven quiet waits in quarantine.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable

from kvconnect.config import ExtraConfig
from kvconnect.metrics import Metrics
from kvconnect.peer.loss import LOSS_RULES, PeerLoss, Quarantine
from kvconnect.peer.messages import Accepted, Cancel, Declined, Landed, Message, Wanted, Written
from kvconnect.worker.landing import LandingBay
from kvconnect.worker.ledger import Leg, LegEvent, LegState, Loading
from kvconnect.worker.routes import Asked

logger = logging.getLogger(__name__)

MOST_REPEATS = 4
"""How often a fetch is asked for anew because the peer lost what it was sending, and began again itself."""
SILENT_S = 0.5
"""How long a peer that cannot be heard may still write, where its writes can be kept out after that."""

_MOST_CANCELLED = 4096
"""Cancelled fetches that are remembered: what the peer sent before it knew, and its answer, are no fault."""

AboutFetch = Accepted | Declined | Landed | Wanted | Written


class Legs:
    """All legs that were asked for, by the number of their fetch.

    Args:
        bay: where the packed path lands.
        can_renew: memory can be made unreachable to those who may still write to it.
        say: tells the rank that a leg was asked of, if it can still be spoken to.
    """

    def __init__(
        self,
        config: ExtraConfig,
        bay: LandingBay,
        say: Callable[[Loading, Leg, Message], None],
        metrics: Metrics,
        *,
        can_renew: bool,
    ) -> None:
        self._config = config
        self._bay = bay
        self._say = say
        self._metrics = metrics
        self._can_renew = can_renew
        self._loads: dict[int, Loading] = {}
        self._cancelled: OrderedDict[int, str] = OrderedDict()
        self._transfer_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._loads)

    def find(self, transfer_id: int) -> tuple[Loading, Leg] | None:
        """The leg that was asked for under a number."""
        loading = self._loads.get(transfer_id)
        for leg in loading.legs.values() if loading is not None else ():
            if loading is not None and leg.transfer_id == transfer_id:
                return loading, leg
        return None

    def new_transfer_id(self) -> int:
        """A number for a fetch."""
        return next(self._transfer_ids)

    def asked(self, loading: Loading, leg: Leg, transfer_id: int, link: str, asked: Asked) -> None:
        """A fetch is being sent."""
        leg.move(LegEvent.ASK)
        leg.transfer_id, leg.link, leg.epoch = transfer_id, link, 0
        leg.path, leg.closed, leg.is_cut, leg.is_answered = asked.only_path, asked.closed, False, False
        self._loads[transfer_id] = loading

    def hear(self, message: AboutFetch, link: str, now: float) -> None:
        """A peer says something about a fetch. Only the peer that was asked can."""
        loading, leg = self.find(message.transfer_id) or (None, None)
        if loading is None or leg is None or leg.link != link:
            # Of a fetch that is over for us. Whether slots may be lent again is all that is left to hear.
            if isinstance(message, Written):
                self._bay.answered(message, link, now + self._config.quarantine_s)
            if self._cancelled.get(message.transfer_id) != link:
                self._metrics.failures.labels("peer_message").inc()
                logger.warning("%s speaks of transfer %d, which it was not asked", link, message.transfer_id)
            return
        match message:
            case Written():
                self._written(loading, leg, message, now)
            case _ if leg.state is not LegState.ASKED:
                pass
            case Accepted(epoch=epoch):
                self._accepted(loading, leg, epoch)
            case Declined():
                if leg.path == "":
                    leg.path = "direct"
                    self._bay.close(leg.transfer_id, None)
            case Wanted():
                self._bay.wanted(message)
            case Landed():
                self._landed(loading, leg, message)

    def _accepted(self, loading: Loading, leg: Leg, epoch: int) -> None:
        told = loading.epochs.get(leg.rank, epoch)
        if told != epoch:
            self._metrics.failures.labels("epoch").inc()
            loading.fail("the peer holds something else under this handle than before")
        leg.epoch = epoch

    def _landed(self, loading: Loading, leg: Leg, message: Landed) -> None:
        if not leg.epoch and message.epoch:
            self._accepted(loading, leg, message.epoch)
        if loading.error:
            return
        reason = self._bay.landed(message)
        if reason:
            self._metrics.failures.labels("landing").inc()
            loading.fail(f"what landed is not what was asked for: {reason}")
        elif leg.path == "":
            leg.path = "packed"

    def _written(self, loading: Loading, leg: Leg, written: Written, now: float) -> None:
        is_first, leg.is_answered = not leg.is_answered, True
        if leg.state is LegState.BUSY:
            if written.quiet:
                self._bay.settle(leg.transfer_id)
                self.leave(leg, LegEvent.SETTLE)
            elif is_first:
                # A fetch has one answer: whoever repeats it cannot keep our blocks from us for ever.
                leg.quarantine.extend(now + self._config.quarantine_s)
            return
        if leg.state is LegState.UNPACKING:
            # It failed before this; its slots need not wait for our kernel, nor for time to prove it.
            self._bay.answered(written, leg.link, now + self._config.quarantine_s)
        if leg.state is not LegState.ASKED:
            return
        if written.ok and written.quiet:
            self._all_written(loading, leg, written)
            return
        # The peer may have met us anew before it began: then it was cut, but what it wrote was not.
        until = None if written.quiet else now + self._config.quarantine_s
        is_lost = leg.is_cut and leg.path == "packed"
        repeats = (written.again or leg.is_cut) and (written.quiet or is_lost)
        if repeats and not loading.error and leg.repeats < MOST_REPEATS:
            # Nothing that landed counts. It is asked for anew once none of it is being unpacked any more.
            leg.repeats += 1
            self._bay.close(leg.transfer_id, until, leg.link, written.unsettled)
            loading.epochs.pop(leg.rank, None)
            self.leave(leg, LegEvent.REPEAT)
            return
        reason = written.error or "the peer gave no reason"
        if leg.closed:
            reason += f"; the packed path was not asked for: {leg.closed}"
        loading.fail(reason)
        # It has stopped submitting, so only what it could not call back is still under way.
        self.end(loading, leg, until, written.unsettled)

    def _all_written(self, loading: Loading, leg: Leg, written: Written) -> None:
        """Every byte was written: it counts if it is of the lease under which the fetch was accepted."""
        # Over the packed path no epoch was told if no chunk has landed, which fails by itself.
        if written.epoch != leg.epoch and (leg.epoch or leg.path == "direct"):
            self._metrics.failures.labels("epoch").inc()
            loading.fail("what was written is not of the lease under which the peer accepted the fetch")
            self.end(loading, leg, None)
            return
        moved = loading.moved.setdefault(leg.path or "direct", [0, 0])
        moved[0] += written.total_bytes
        moved[1] += written.copies
        if math.isfinite(written.seconds):
            loading.seconds = max(loading.seconds, written.seconds)
        if leg.path == "direct":
            self._bay.close(leg.transfer_id, None)
            self.leave(leg, LegEvent.LAND)
        else:
            leg.move(LegEvent.ARRIVE)

    def check_landing(self, loading: Loading, leg: Leg) -> None:
        """What landed is unpacked: commit it, or fail."""
        landing = self._bay.find(leg.transfer_id)
        if landing is not None and landing.error and leg.state in (LegState.ASKED, LegState.UNPACKING):
            loading.fail(landing.error)
        if leg.state is not LegState.UNPACKING or (landing is not None and not landing.idle):
            return
        if landing is not None and landing.complete and not loading.error:
            self._bay.close(leg.transfer_id, None)
            self.leave(leg, LegEvent.LAND)
            return
        missing = "its" if landing is None else len(landing.chunks) - landing.committed
        loading.fail(f"the peer says that all is written, but {missing} chunks did not land")
        self._bay.close(leg.transfer_id, None)
        self.leave(leg, LegEvent.FAIL)

    def is_unpacking(self, leg: Leg) -> bool:
        """A kernel of ours works for what was asked last, which may be over for the peer."""
        landing = self._bay.find(leg.transfer_id)
        return landing is not None and not landing.idle

    def end(
        self,
        loading: Loading,
        leg: Leg,
        writes_until: float | None,
        unsettled: Container[int] | None = None,
    ) -> None:
        """End a leg that failed after it was asked. ``writes_until``: the peer may write until then.

        Over the packed path a peer can only write to slots: they go to quarantine, our pages are ours.
        ``unsettled`` are the generations of those that it may still write, as far as it said.
        """
        unpacking = self.is_unpacking(leg)
        self._bay.close(leg.transfer_id, writes_until, leg.link, unsettled)
        if leg.path == "packed":
            self.leave(leg, LegEvent.ARRIVE if unpacking else LegEvent.FAIL)
        elif writes_until is None:
            self.leave(leg, LegEvent.FAIL)
        else:
            self.leave(leg, LegEvent.LOSE)
            leg.quarantine = Quarantine(writes_until, is_unproven=True)

    def lose(
        self, loads: Iterable[Loading], rank: int, link: str, loss: PeerLoss, reason: str, now: float
    ) -> bool:
        """The connection over which a rank was asked is over. Whether something is to be asked for again."""
        is_any_again = False
        for loading in loads:
            leg = loading.legs.get(rank)
            if leg is None or leg.link != link or leg.state is not LegState.ASKED:
                continue
            if not LOSS_RULES[loss].asks_again:
                loading.fail(reason)
                self.end(loading, leg, self._longest_write(loading, now))
            elif loading.met_again or loading.error:
                loading.fail(reason)
                self.end(loading, leg, None)
            else:
                loading.met_again = is_any_again = True
                self._bay.close(leg.transfer_id, None)
                self.leave(leg, LegEvent.FORGET)
        if self._can_renew:
            self.hasten(loads, {link}, now + SILENT_S, proven=False)
        return is_any_again

    def hasten(self, loads: Iterable[Loading], links: Container[str], until: float, *, proven: bool) -> None:
        """What may still be written over these connections need not be waited for longer than until then.

        ``proven``: nothing is written later, since the process behind them ended.
        """
        self._bay.hasten(links, until, proven=proven)
        for loading in loads:
            for leg in loading.legs.values():
                if leg.state is LegState.BUSY and leg.link in links:
                    leg.quarantine.hasten(until, proven=proven)

    def has_unproven(self, loads: Iterable[Loading], now: float) -> bool:
        """Memory is to be used again now that somebody may still write."""
        return self._can_renew and (
            self._bay.has_unproven(now)
            or any(
                leg.state is LegState.BUSY and leg.quarantine.ends_unproven(now)
                for loading in loads
                if loading.error
                for leg in loading.legs.values()
            )
        )

    def renewed(self, loads: Iterable[Loading]) -> None:
        """Nobody can write any more to what was registered: what was lost is quiet, the rest is cut."""
        self._bay.settle_all()
        for loading in loads:
            for leg in loading.legs.values():
                if leg.state is LegState.BUSY:
                    self.leave(leg, LegEvent.SETTLE)
                elif leg.state is LegState.ASKED:
                    leg.is_cut = True

    def _longest_write(self, loading: Loading, now: float) -> float:
        """When a peer that we cannot hear has stopped for sure.

        It may go on until the time that it was given is over, which is the load's deadline; what it
        started last may still be on its way after that.
        """
        return max(now, loading.deadline) + self._config.quarantine_s

    def wind_up(self, loading: Loading, now: float) -> None:
        """A load that failed: end its legs, each by the way that its state allows."""
        for leg in loading.legs.values():
            match leg.state:
                case LegState.MEETING:
                    if not self.is_unpacking(leg):
                        self.leave(leg, LegEvent.FAIL)
                case LegState.ASKED:
                    # The peer answers a cancel as soon as it has stopped; until then it may write.
                    self.end(loading, leg, self._longest_write(loading, now))
                    self._cancel(loading, leg)
                case LegState.BUSY:
                    if now >= leg.quarantine.until:
                        self._metrics.failures.labels("quarantine_over").inc()
                        logger.warning(
                            "request %s: the peer did not say that it stopped; its blocks were kept "
                            "unused until nothing could arrive any more",
                            loading.order.request_id,
                        )
                        self.leave(leg, LegEvent.SETTLE)
                case LegState.UNPACKING | LegState.LANDED | LegState.FAILED:
                    pass

    def _cancel(self, loading: Loading, leg: Leg) -> None:
        self._say(loading, leg, Cancel(leg.transfer_id))
        self._cancelled[leg.transfer_id] = leg.link
        while len(self._cancelled) > _MOST_CANCELLED:
            self._cancelled.popitem(last=False)

    def leave(self, leg: Leg, event: LegEvent) -> None:
        """Change a leg's state, and forget its number if it has no use for it any more."""
        leg.move(event)
        if leg.over or leg.state is LegState.MEETING:
            self._loads.pop(leg.transfer_id, None)
