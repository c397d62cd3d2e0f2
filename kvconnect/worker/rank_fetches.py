"""The rank_fetches of D's loads: what each rank of a peer was asked for, and what became of it.

Owned by the transfer thread. A fetch is over only when nothing of it can touch memory any more; what could
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
from kvconnect.peer.messages import Accepted, Cancel, CreditRequest, Declined, Landed, Message, Written
from kvconnect.worker.landing import LandingBay
from kvconnect.worker.loads import LoadRecord, RankFetch, RankFetchEvent, RankFetchState
from kvconnect.worker.routes import Asked

logger = logging.getLogger(__name__)

MOST_REPEATS = 4
"""How often a fetch is asked for anew because the peer lost what it was sending, and began again itself."""
SILENT_S = 0.5
"""How long a peer that cannot be heard may still write, where its writes can be kept out after that."""

_MOST_CANCELLED = 4096
"""Cancelled fetches that are remembered: what the peer sent before it knew, and its answer, are no fault."""

AboutFetch = Accepted | Declined | Landed | CreditRequest | Written


class RankFetches:
    """All rank_fetches that were asked for, by the number of their fetch.

    Args:
        bay: where the packed path lands.
        can_renew: memory can be made unreachable to those who may still write to it.
        say: tells the rank that a fetch was asked of, if it can still be spoken to.
    """

    def __init__(
        self,
        config: ExtraConfig,
        bay: LandingBay,
        say: Callable[[LoadRecord, RankFetch, Message], None],
        metrics: Metrics,
        *,
        can_renew: bool,
    ) -> None:
        self._config = config
        self._bay = bay
        self._say = say
        self._metrics = metrics
        self._can_renew = can_renew
        self._loads: dict[int, LoadRecord] = {}
        self._cancelled: OrderedDict[int, str] = OrderedDict()
        self._transfer_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._loads)

    def find(self, transfer_id: int) -> tuple[LoadRecord, RankFetch] | None:
        """The fetch that was asked for under a number."""
        loading = self._loads.get(transfer_id)
        for fetch in loading.fetches.values() if loading is not None else ():
            if loading is not None and fetch.transfer_id == transfer_id:
                return loading, fetch
        return None

    def new_transfer_id(self) -> int:
        """A number for a fetch."""
        return next(self._transfer_ids)

    def asked(self, loading: LoadRecord, fetch: RankFetch, transfer_id: int, link: str, asked: Asked) -> None:
        """A fetch is being sent."""
        fetch.move(RankFetchEvent.ASK)
        fetch.transfer_id, fetch.link, fetch.epoch = transfer_id, link, 0
        fetch.path, fetch.closed, fetch.is_cut, fetch.is_answered = (
            asked.only_path,
            asked.closed,
            False,
            False,
        )
        self._loads[transfer_id] = loading

    def hear(self, message: AboutFetch, link: str, now: float) -> None:
        """A peer says something about a fetch. Only the peer that was asked can."""
        loading, fetch = self.find(message.transfer_id) or (None, None)
        if loading is None or fetch is None or fetch.link != link:
            # Of a fetch that is over for us. Whether slots may be lent again is all that is left to hear.
            if isinstance(message, Written):
                self._bay.answered(message, link, now + self._config.quarantine_s)
            if self._cancelled.get(message.transfer_id) != link:
                self._metrics.failures.labels("peer_message").inc()
                logger.warning("%s speaks of transfer %d, which it was not asked", link, message.transfer_id)
            return
        match message:
            case Written():
                self._written(loading, fetch, message, now)
            case _ if fetch.state is not RankFetchState.ASKED:
                pass
            case Accepted(epoch=epoch):
                self._accepted(loading, fetch, epoch)
            case Declined():
                if fetch.path == "":
                    fetch.path = "direct"
                    self._bay.close(fetch.transfer_id, None)
            case CreditRequest():
                self._bay.wanted(message)
            case Landed():
                self._landed(loading, fetch, message)

    def _accepted(self, loading: LoadRecord, fetch: RankFetch, epoch: int) -> None:
        told = loading.epochs.get(fetch.rank, epoch)
        if told != epoch:
            self._metrics.failures.labels("epoch").inc()
            loading.fail("the peer holds something else under this handle than before")
        fetch.epoch = epoch

    def _landed(self, loading: LoadRecord, fetch: RankFetch, message: Landed) -> None:
        if not fetch.epoch and message.epoch:
            self._accepted(loading, fetch, message.epoch)
        if loading.error:
            return
        reason = self._bay.landed(message)
        if reason:
            self._metrics.failures.labels("landing").inc()
            loading.fail(f"what landed is not what was asked for: {reason}")
        elif fetch.path == "":
            fetch.path = "packed"

    def _written(self, loading: LoadRecord, fetch: RankFetch, written: Written, now: float) -> None:
        is_first, fetch.is_answered = not fetch.is_answered, True
        if fetch.state is RankFetchState.BUSY:
            if written.quiescent:
                self._bay.settle(fetch.transfer_id)
                self.leave(fetch, RankFetchEvent.SETTLE)
            elif is_first:
                # A fetch has one answer: a peer that repeats it cannot keep our blocks from us for ever.
                fetch.quarantine.extend(now + self._config.quarantine_s)
            return
        if fetch.state is RankFetchState.UNPACKING:
            # It failed before this; its slots need not wait for our kernel, nor for time to prove it.
            self._bay.answered(written, fetch.link, now + self._config.quarantine_s)
        if fetch.state is not RankFetchState.ASKED:
            return
        if written.ok and written.quiescent:
            self._all_written(loading, fetch, written)
            return
        # The peer may have met us anew before it began: then it was cut, but what it wrote was not.
        until = None if written.quiescent else now + self._config.quarantine_s
        is_lost = fetch.is_cut and fetch.path == "packed"
        repeats = (written.again or fetch.is_cut) and (written.quiescent or is_lost)
        if repeats and not loading.error and fetch.repeats < MOST_REPEATS:
            # Nothing that landed counts. It is asked for anew once none of it is being unpacked any more.
            fetch.repeats += 1
            self._bay.close(fetch.transfer_id, until, fetch.link, written.unsettled)
            loading.epochs.pop(fetch.rank, None)
            self.leave(fetch, RankFetchEvent.REPEAT)
            return
        reason = written.error or "the peer gave no reason"
        if fetch.closed:
            reason += f"; the packed path was not asked for: {fetch.closed}"
        loading.fail(reason)
        # It has stopped submitting, so only what it could not call back is still under way.
        self.end(loading, fetch, until, written.unsettled)

    def _all_written(self, loading: LoadRecord, fetch: RankFetch, written: Written) -> None:
        """Every byte was written: it counts if it is of the lease under which the fetch was accepted."""
        # Over the packed path no epoch was told if no chunk has landed, which fails by itself.
        if written.epoch != fetch.epoch and (fetch.epoch or fetch.path == "direct"):
            self._metrics.failures.labels("epoch").inc()
            loading.fail("what was written is not of the lease under which the peer accepted the fetch")
            self.end(loading, fetch, None)
            return
        moved = loading.moved.setdefault(fetch.path or "direct", [0, 0])
        moved[0] += written.total_bytes
        moved[1] += written.copies
        if math.isfinite(written.seconds):
            loading.seconds = max(loading.seconds, written.seconds)
        if fetch.path == "direct":
            self._bay.close(fetch.transfer_id, None)
            self.leave(fetch, RankFetchEvent.LAND)
        else:
            fetch.move(RankFetchEvent.ARRIVE)

    def check_landing(self, loading: LoadRecord, fetch: RankFetch) -> None:
        """What landed is unpacked: commit it, or fail."""
        landing = self._bay.find(fetch.transfer_id)
        if (
            landing is not None
            and landing.error
            and fetch.state in (RankFetchState.ASKED, RankFetchState.UNPACKING)
        ):
            loading.fail(landing.error)
        if fetch.state is not RankFetchState.UNPACKING or (landing is not None and not landing.idle):
            return
        if landing is not None and landing.complete and not loading.error:
            self._bay.close(fetch.transfer_id, None)
            self.leave(fetch, RankFetchEvent.LAND)
            return
        missing = "its" if landing is None else len(landing.chunks) - landing.committed
        loading.fail(f"the peer says that all is written, but {missing} chunks did not land")
        self._bay.close(fetch.transfer_id, None)
        self.leave(fetch, RankFetchEvent.FAIL)

    def is_unpacking(self, fetch: RankFetch) -> bool:
        """A kernel of ours works for what was asked last, which may be over for the peer."""
        landing = self._bay.find(fetch.transfer_id)
        return landing is not None and not landing.idle

    def end(
        self,
        loading: LoadRecord,
        fetch: RankFetch,
        writes_until: float | None,
        unsettled: Container[int] | None = None,
    ) -> None:
        """End a fetch that failed after it was asked. ``writes_until``: the peer may write until then.

        Over the packed path a peer can only write to slots: they go to quarantine, our pages are ours.
        ``unsettled`` are the generations of those that it may still write, as far as it said.
        """
        unpacking = self.is_unpacking(fetch)
        self._bay.close(fetch.transfer_id, writes_until, fetch.link, unsettled)
        if fetch.path == "packed":
            self.leave(fetch, RankFetchEvent.ARRIVE if unpacking else RankFetchEvent.FAIL)
        elif writes_until is None:
            self.leave(fetch, RankFetchEvent.FAIL)
        else:
            self.leave(fetch, RankFetchEvent.LOSE)
            fetch.quarantine = Quarantine(writes_until, is_unproven=True)

    def lose(
        self, loads: Iterable[LoadRecord], rank: int, link: str, loss: PeerLoss, reason: str, now: float
    ) -> bool:
        """The connection over which a rank was asked is over. Whether something is to be asked for again."""
        is_any_again = False
        for loading in loads:
            fetch = loading.fetches.get(rank)
            if fetch is None or fetch.link != link or fetch.state is not RankFetchState.ASKED:
                continue
            if not LOSS_RULES[loss].asks_again:
                loading.fail(reason)
                self.end(loading, fetch, self._longest_write(loading, now))
            elif loading.met_again or loading.error:
                loading.fail(reason)
                self.end(loading, fetch, None)
            else:
                loading.met_again = is_any_again = True
                self._bay.close(fetch.transfer_id, None)
                self.leave(fetch, RankFetchEvent.FORGET)
        if self._can_renew:
            self.hasten(loads, {link}, now + SILENT_S, proven=False)
        return is_any_again

    def hasten(
        self, loads: Iterable[LoadRecord], links: Container[str], until: float, *, proven: bool
    ) -> None:
        """What may still be written over these connections need not be waited for longer than until then.

        ``proven``: nothing is written later, since the process behind them ended.
        """
        self._bay.hasten(links, until, proven=proven)
        for loading in loads:
            for fetch in loading.fetches.values():
                if fetch.state is RankFetchState.BUSY and fetch.link in links:
                    fetch.quarantine.hasten(until, proven=proven)

    def has_unproven(self, loads: Iterable[LoadRecord], now: float) -> bool:
        """Memory is to be used again that a peer may still write."""
        return self._can_renew and (
            self._bay.has_unproven(now)
            or any(
                fetch.state is RankFetchState.BUSY and fetch.quarantine.ends_unproven(now)
                for loading in loads
                if loading.error
                for fetch in loading.fetches.values()
            )
        )

    def renewed(self, loads: Iterable[LoadRecord]) -> None:
        """No peer can write any more to what was registered: what was lost is quiescent, the rest is cut."""
        self._bay.settle_all()
        for loading in loads:
            for fetch in loading.fetches.values():
                if fetch.state is RankFetchState.BUSY:
                    self.leave(fetch, RankFetchEvent.SETTLE)
                elif fetch.state is RankFetchState.ASKED:
                    fetch.is_cut = True

    def _longest_write(self, loading: LoadRecord, now: float) -> float:
        """When a peer that we cannot hear has stopped for sure.

        It may go on until the time that it was given is over, which is the load's deadline; what it
        started last may still be on its way after that.
        """
        return max(now, loading.deadline) + self._config.quarantine_s

    def wind_up(self, loading: LoadRecord, now: float) -> None:
        """A load that failed: end its rank_fetches, each by the way that its state allows."""
        for fetch in loading.fetches.values():
            match fetch.state:
                case RankFetchState.MEETING:
                    if not self.is_unpacking(fetch):
                        self.leave(fetch, RankFetchEvent.FAIL)
                case RankFetchState.ASKED:
                    # The peer answers a cancel as soon as it has stopped; until then it may write.
                    self.end(loading, fetch, self._longest_write(loading, now))
                    self._cancel(loading, fetch)
                case RankFetchState.BUSY:
                    if now >= fetch.quarantine.until:
                        self._metrics.failures.labels("quarantine_over").inc()
                        logger.warning(
                            "request %s: the peer did not say that it stopped; its blocks were kept "
                            "unused until nothing could arrive any more",
                            loading.order.request_id,
                        )
                        self.leave(fetch, RankFetchEvent.SETTLE)
                case RankFetchState.UNPACKING | RankFetchState.LANDED | RankFetchState.FAILED:
                    pass

    def _cancel(self, loading: LoadRecord, fetch: RankFetch) -> None:
        self._say(loading, fetch, Cancel(fetch.transfer_id))
        self._cancelled[fetch.transfer_id] = fetch.link
        while len(self._cancelled) > _MOST_CANCELLED:
            self._cancelled.popitem(last=False)

    def leave(self, fetch: RankFetch, event: RankFetchEvent) -> None:
        """Change a fetch's state, and forget its number if it has no use for it any more."""
        fetch.move(event)
        if fetch.over or fetch.state is RankFetchState.MEETING:
            self._loads.pop(fetch.transfer_id, None)
