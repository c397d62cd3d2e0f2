"""The rooms of one rank: what SGLang asked for in each, how far it is, and the orders to the worker half.

A room is the number of a request, which a router gives to both nodes. SGLang counts in pages, and so do the
numbers of tokens here: both sides round them up to whole pages. Owned by the scheduler's thread; nothing
waits. Time is an argument of the constructor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvconnect.errors import LayoutError
from kvconnect.halves.worker_half import WorkerHalf
from kvconnect.outcome import Cause, Reason
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.sglang.rank_pools import RankPools
from kvconnect.transfer.attached_rows import AttachedRows
from kvconnect.transfer.orders import Hold, Load, OrdersDraft, Progress, Results
from kvconnect.transfer.params import TRANSFER_KEY, read_transfer_id

FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS = range(5)
"""SGLang's states of a request, as numbered by its ``KVPoll``."""

_IN_USE = Cause.PARAMETERS(
    "its bootstrap_room is that of another request, which has not ended: a router has to "
    "give each a room of its own"
)
_ABORTED = Cause.ABORTED("the request was aborted")
_RELEASED = Cause.ABORTED("the decode node released the request: its client left, or it failed there")
_OTHER_AUX = Cause.OTHER_LAYOUT("the rows beside the KV have another size on the prefill node")

States = Sequence[Any] | None
"""SGLang's indices by state component; given with the last pages."""

Found = tuple[str, int] | Reason
"""The address of P's rank 0, or why it is not known."""


@dataclass(eq=False)
class PrefillRoom:
    """P's record of a request. D has the tokens before ``first_token``; ``num_pages`` are to be sent.

    ``is_held``: a hold was ordered and has not ended. ``began_at``: when it was opened.
    """

    handle: str
    began_at: float
    state: int = BOOTSTRAPPING
    reason: Reason | None = None
    first_token: int = 0
    num_pages: int = 0
    pages: list[int] = field(default_factory=list)
    is_held: bool = False
    sending_since: float = 0.0
    seconds: float | None = None


@dataclass(eq=False)
class DecodeRoom:
    """D's record of a request. ``aux_index``: where the rows go that come with the KV.

    ``is_loading``: a load was ordered and has not ended, so that D's pages may still be written.
    """

    handle: str
    found: Future[Found] | None = None
    peer: tuple[str, int] = ("", 0)
    state: int = BOOTSTRAPPING
    reason: Reason | None = None
    aux_index: int = 0
    is_loading: bool = False
    is_aborted: bool = False


class RoomLedger:
    """All rooms of a rank, by handle.

    Args:
        replicated: ranks keep the same KV, so that D may fetch it from another one.
        bootstrap_timeout_s: how long P waits for D to ask for a request.
    """

    def __init__(
        self,
        worker: WorkerHalf,
        pools: RankPools,
        aux: AttachedRows,
        *,
        bootstrap_timeout_s: float,
        clock: Callable[[], float],
        replicated: bool = False,
    ) -> None:
        self._worker, self._pools, self._aux, self._clock = worker, pools, aux, clock
        self._bootstrap_timeout_s, self._replicated = bootstrap_timeout_s, replicated
        self._draft = OrdersDraft([], clock)
        self._prefill: dict[str, PrefillRoom] = {}
        self._decode: dict[str, DecodeRoom] = {}
        self._has_results = False
        worker.on_results(self._wake)

    def _wake(self) -> None:
        """On the transfer thread."""
        self._has_results = True

    # P

    def open_prefill(self, room: int) -> PrefillRoom:
        """A request arrived at P. One whose room is in use has failed."""
        made = PrefillRoom(_handle(room), self._clock())
        if made is not self._prefill.setdefault(made.handle, made):
            made.state, made.reason = FAILED, _IN_USE
            return made
        self._draft.expected.append(made.handle)
        self._order()
        return made

    def send(self, room: PrefillRoom, pages: Sequence[int], states: States, aux_index: int) -> None:
        """The KV in these pages, which follow those sent before, is complete. The last have the states."""
        if room.state in (FAILED, SUCCESS):
            return
        if not room.pages:
            room.sending_since = self._clock()
        room.state = TRANSFERRING
        tokens, first = self._pools.page_tokens, len(room.pages)
        new = tuple(map(int, pages))
        room.pages.extend(new)
        first_page, is_last = room.first_token // tokens, len(room.pages) >= room.num_pages
        num_tokens = (first_page + room.num_pages) * tokens
        if not is_last:
            if self._pools.streams:
                # Blocks are counted from the prompt's beginning: there D has no use for any.
                skipped, begin = ((), first_page + first) if first else ((0,) * first_page, 0)
                blocks = (GroupBlocks(0, begin, (*skipped, *new)),)
                computed = (first_page + len(room.pages)) * tokens
                self._draft.progress.append(Progress(room.handle, num_tokens, computed, blocks))
                self._order()
            return
        try:
            groups = self._pools.groups(first_page, room.pages, states)
        except LayoutError as error:
            self.fail(room, Cause.BLOCKS(str(error)))
            return
        room.is_held = True
        held = room.handle, room.handle, num_tokens, groups, self._draft.step
        self._draft.holds.append(Hold(*held, self._aux.read(aux_index)))
        self._order()

    def poll_prefill(self, room: PrefillRoom) -> int:
        """The state of a request on P; never waits."""
        self._take_results()
        if room.state == BOOTSTRAPPING and self._clock() - room.began_at >= self._bootstrap_timeout_s:
            text = f"no decode node asked for the request within {self._bootstrap_timeout_s:g} s"
            self.fail(room, Cause.TIMEOUT(text))
        return room.state

    def fail(self, room: PrefillRoom, reason: Reason = _ABORTED) -> None:
        """End a request on P, whose pages SGLang frees at once: no peer uses what it is sent from now on."""
        if room.state in (FAILED, SUCCESS):
            return
        room.state, room.reason = FAILED, reason
        self._worker.revoke(room.handle, reason)
        if not room.is_held:
            self._prefill.pop(room.handle, None)

    # D

    def open_decode(self, room: int, found: Future[Found]) -> DecodeRoom:
        """A request arrived at D; ``found`` gets the address of P. One whose room is in use has failed."""
        made = DecodeRoom(_handle(room), found)
        if made is not self._decode.setdefault(made.handle, made):
            made.state, made.reason = FAILED, _IN_USE
        return made

    def load(
        self, room: DecodeRoom, pages: Sequence[int], states: States, aux_index: int, first_token: int
    ) -> None:
        """Fetch the pages that follow the prompt's first tokens, which D has."""
        if room.state != WAITING_FOR_INPUT:
            return
        tokens = self._pools.page_tokens
        first_page, num_tokens = first_token // tokens, first_token + len(pages) * tokens
        try:
            groups = self._pools.groups(first_page, [*map(int, pages)], states)
        except LayoutError as error:
            self._end(room, Cause.BLOCKS(str(error)))
            return
        room.state, room.aux_index, room.is_loading = TRANSFERRING, aux_index, True
        order = Load(room.handle, room.handle, ("", *room.peer), num_tokens, groups, first_token=first_token)
        self._draft.loads.append(order)
        self._order()

    def poll_decode(self, room: DecodeRoom) -> int:
        """The state of a request on D; never waits. A failed one is reported once its pages are quiescent."""
        self._take_results()
        if room.state == BOOTSTRAPPING and room.found is not None and room.found.done():
            found = room.found.result()
            if isinstance(found, Reason):
                self._end(room, found)
            else:
                room.peer, room.state = found, WAITING_FOR_INPUT
        return room.state

    def abort(self, room: DecodeRoom, reason: Reason = _ABORTED) -> None:
        """End a request on D. Its state is ``FAILED`` once nothing writes to its pages any more."""
        if room.state in (FAILED, SUCCESS):
            return
        if not room.is_loading:
            self._end(room, reason)
        elif not room.is_aborted:
            room.is_aborted = True
            self._draft.aborted.append(room.handle)
            self._order()

    def _end(self, room: DecodeRoom, reason: Reason | None) -> None:
        room.state, room.reason, room.is_loading = FAILED if reason else SUCCESS, reason, False
        if self._decode.get(room.handle) is room:
            del self._decode[room.handle]

    def is_loading(self, room: int) -> bool:
        """Whether peers or kernels may still write to D's pages of a room."""
        self._take_results()
        found = self._decode.get(_handle(room))
        return found is not None and found.is_loading

    # Both

    def _order(self) -> None:
        self._worker.before_step(self._draft.take())

    def _take_results(self) -> None:
        if not self._has_results:
            return
        # Before the results are taken: others may be added meanwhile.
        self._has_results = False
        results = self._worker.results()
        # In ascending order, as a rank may release what another one fetches.
        for handle, first_token in dict(sorted(results.wanted)).items():
            self._wanted(handle, first_token)
        for handle in results.sent:
            self._sent(handle, results.unsent.get(handle))
        for handle in results.received:
            self._received(handle, results)

    def _wanted(self, handle: str, first_token: int) -> None:
        room = self._prefill.get(handle)
        if room is None or room.state in (FAILED, SUCCESS):
            return
        if first_token < 0 and not self._replicated:
            self.fail(room, _RELEASED)
        elif room.state == BOOTSTRAPPING:
            room.state, room.first_token = WAITING_FOR_INPUT, max(0, first_token)

    def _sent(self, handle: str, unsent: Reason | None) -> None:
        room = self._prefill.pop(handle, None)
        if room is None or room.state == FAILED:
            return
        room.is_held, room.reason = False, unsent
        room.state = FAILED if unsent else SUCCESS
        room.seconds = self._clock() - room.sending_since

    def _received(self, handle: str, results: Results) -> None:
        room = self._decode.get(handle)
        if room is None:
            return
        reason = results.failed.get(handle) or (_ABORTED if room.is_aborted else None)
        if not reason and not self._aux.write(room.aux_index, results.attachments.get(handle, b"")):
            reason = _OTHER_AUX
        self._end(room, reason)


def _handle(room: int) -> str:
    return read_transfer_id({TRANSFER_KEY: str(room)})
