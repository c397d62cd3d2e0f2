"""What the halves exchange with each step: orders, as they come together, and results, until they are taken.

These values cross process borders in some serving stacks: plain, picklable, and as small as what changed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import msgspec
from msgspec.structs import astuple

from kvconnect.addresses import RankAddress
from kvconnect.cache.identity import Naming, Prefix
from kvconnect.cache.specs import KVCacheGroup, div_ceil
from kvconnect.outcome import Reason
from kvconnect.plan.blocks import BlockIdsByGroup, Count, GroupBlocks, Index
from kvconnect.timeline import Record

logger = logging.getLogger(__name__)


class _Parts(msgspec.Struct, frozen=True):
    """Lists that may all be empty."""

    def __bool__(self) -> bool:
        return any(astuple(self))


class Progress(msgspec.Struct, frozen=True):
    """How far the prefill behind an expected handle is: ``computed_tokens`` of ``num_tokens``.

    These tokens were given to the device before this order was, and only grow. ``groups`` are the blocks that
    are new since the last order of this handle, of every group that keeps tokens; the last of them may hold
    tokens that are not computed yet.
    """

    handle: str
    num_tokens: int
    computed_tokens: int
    groups: tuple[GroupBlocks, ...] = ()


class Withdraw(msgspec.Struct, frozen=True):
    """Nothing will be held under this handle: fetches that wait for it fail with ``reason``."""

    handle: str
    reason: Reason


class Hold(msgspec.Struct, frozen=True):
    """Keep these blocks until they were fetched or ``lease_s`` passed, then report the request sent.

    The last of its tokens was computed in ``step``, by the number of that step's orders.
    """

    request_id: str
    handle: str
    num_tokens: int
    groups: tuple[GroupBlocks, ...]
    lease_s: float
    step: int


class Find(msgspec.Struct, frozen=True):
    """Ask a peer how many tokens of a prefix, at most ``max_tokens``, it keeps."""

    request_id: str
    engine_id: str
    host: str
    port: int
    prefix: Prefix
    max_tokens: int


class Found(msgspec.Struct, frozen=True):
    """What came of a ``Find``: the peer has ``num_tokens`` in host memory, ``start_tokens`` included, or 0.

    ``seconds`` is how long the link takes for them, endless where that is not known; with its disk the peer
    has ``disk_tokens``, which take ``disk_s``. ``naming`` is that of a peer which names KV otherwise, and
    ``error`` why it could not be asked; ``is_busy``: for this request only.
    """

    request_id: str
    num_tokens: int = 0
    seconds: float = 0.0
    disk_tokens: int = 0
    disk_s: float = 0.0
    naming: Naming | None = None
    error: Reason | None = None
    is_busy: bool = False


class Load(msgspec.Struct, frozen=True):
    """Fetch these blocks from a peer, then report the request received or failed.

    ``num_tokens`` is what the peer must hold, no more and no less. An empty ``engine_id`` is any engine at
    the address. With a ``refusal`` nothing is fetched, and the request is reported failed for that.
    With a ``prefix`` the peer is to hold what it keeps under these names, under this handle of ours.
    """

    request_id: str
    handle: str
    engine_id: str
    host: str
    port: int
    num_tokens: int
    groups: tuple[GroupBlocks, ...]
    refusal: Reason | None = None
    prefix: Prefix | None = None


class Await(msgspec.Struct, frozen=True):
    """A request that may fetch under this handle waits for blocks: keep what the peer holds for it.

    A ``Load`` or a ``LetGo`` of the handle ends it; given again where something of it is new. If it
    ``reports`` the handle is reported settled, once, when the peer holds it or never will.
    """

    handle: str
    engine_id: str
    host: str
    port: int
    reports: bool = False


class LetGo(msgspec.Struct, frozen=True):
    """Send a peer that nothing will be fetched. Reports nothing."""

    request_id: str
    handle: str
    engine_id: str
    host: str
    port: int


class RowCopies(msgspec.Struct, frozen=True, array_like=True):
    """Logical blocks of one cache group and the rows that belong to them, pairwise.

    A row holds the pages of one block in all layers of the group, in its row class (``offload.budgets``).
    """

    group: Index
    block_ids: tuple[Count, ...]
    rows: tuple[Count, ...]


class Store(msgspec.Struct, frozen=True):
    """Copy blocks to rows; then report the job stored, or failed.

    The blocks hold what the device was given before the step that carries this order, and may be overwritten
    by that step: the worker reads them before. ``hashes`` name their contents. With ``keep`` the rows are
    written to the lower tiers too, and the job is reported kept once they are not read for that any more.
    ``footers``, one each if any, are what the contents stand for, to be kept on disk with the rows.
    """

    job: int
    copies: RowCopies
    hashes: tuple[bytes, ...]
    keep: bool = False
    footers: tuple[bytes, ...] = ()


class Restore(msgspec.Struct, frozen=True):
    """Copy rows to the blocks of a request that waits for them, then report it received, or failed.

    With a ``refusal`` nothing is copied, and the request is reported failed with that text.
    """

    request_id: str
    copies: tuple[RowCopies, ...]
    refusal: str = ""


class Seek(msgspec.Struct, frozen=True):
    """Ask a tier that keeps no index here which of these contents it has, then report them."""

    job: int
    tier: str
    group: Index
    hashes: tuple[bytes, ...]


class TierFetch(Seek, frozen=True):
    """Read contents from a lower tier into rows, then report which of them are not there."""

    rows: tuple[Count, ...]


class OffloadOrders(_Parts, frozen=True):
    """What the tiers below the device's memory are to do.

    ``held_rows`` are the rows of host memory that hold something, by class, once this is done; empty where
    there is nothing to do. ``disk_pins`` are contents that must stay on disk, there or not yet, or need
    not any more; ``actions`` what was asked for sessions, what came of it and how often, to be counted, and
    ``pinned`` how many bytes of each tier sessions hold, if that has changed.
    """

    stores: tuple[Store, ...] = ()
    restores: tuple[Restore, ...] = ()
    fetches: tuple[TierFetch, ...] = ()
    seeks: tuple[Seek, ...] = ()
    clear: bool = False
    """Forget everything that lower tiers keep, before any of the others."""
    held_rows: tuple[Count, ...] = ()
    disk_pins: tuple[tuple[Index, bytes, bool], ...] = ()
    actions: tuple[tuple[str, str, int], ...] = ()
    pinned: tuple[tuple[str, int], ...] = ()


CHANGES_AT_ONCE = 2048
"""A tier that finds what it kept before its start has a million of them, and a step some milliseconds."""


class TierChange(msgspec.Struct, frozen=True, array_like=True):
    """Contents that a lower tier of one rank has got, or has no more.

    ``footers``, one of each that is ``added`` if any, are of those that the tier found from before its start.
    """

    tier: str
    group: Index
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    footers: tuple[bytes, ...] = ()


class OffloadReport(msgspec.Struct, frozen=True):
    """What the tiers of one rank have done since the last report. Jobs come back exactly once in each list.

    ``stored`` are, by job, the hashes that failed, none as a rule; ``kept`` the jobs whose rows no lower tier
    reads any more. ``fetched`` are, by job, the hashes that are not there or not right; their rows hold
    nothing of use. ``found`` are, by job, the hashes that a tier has. ``cleared`` counts the orders to clear
    that were carried out: ``changes`` are of what came after them. While a rank ``is_recovering`` its tiers
    have more to report of what they had before their start.
    """

    rank: int
    cleared: int = 0
    stored: Mapping[int, tuple[bytes, ...]] = {}
    kept: tuple[int, ...] = ()
    fetched: Mapping[int, tuple[bytes, ...]] = {}
    found: Mapping[int, tuple[bytes, ...]] = {}
    changes: tuple[TierChange, ...] = ()
    is_recovering: bool = False

    def __bool__(self) -> bool:
        return any(astuple(self)[2:])


NO_OFFLOAD = OffloadOrders()
"""Nothing: to compare with it costs no call."""


class Orders(_Parts, frozen=True):
    """One step's orders. ``directory`` is sent once, when the addresses of all ranks are known.

    ``expected`` are handles whose prefill is under way, so that fetches of it wait: a ``Hold`` or a
    ``Withdraw`` of the same handle always follows, of a long one ``Progress`` before that. ``preempted`` are
    those of them that lost their blocks, and begin anew. ``aborted`` are requests that ended while their load
    was under way: it is cancelled, and still reported, once their blocks are quiescent. ``failures`` are
    reasons to count: the scheduler half has no metrics of its own. Orders of one handle are carried out in
    this sequence: withdrawn, expected, preempted, progress, holds; and loads or let_go before awaited.

    ``step`` counts the orders of one scheduler half: these come with step ``step``, and what they name was
    given to the device before it. ``zeroes_loads``: the step may still zero what its loads and restores fill.
    ``notes`` are for the timeline of rank 0, and nothing to carry out. ``pulls`` are to be counted: what came
    of requests for which peers were asked by name, and the tokens that were loaded.
    """

    step: int = 0
    zeroes_loads: bool = False
    notes: tuple[Record, ...] = ()
    holds: tuple[Hold, ...] = ()
    loads: tuple[Load, ...] = ()
    let_go: tuple[LetGo, ...] = ()
    aborted: tuple[str, ...] = ()
    directory: tuple[RankAddress, ...] = ()
    expected: tuple[str, ...] = ()
    withdrawn: tuple[Withdraw, ...] = ()
    failures: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    progress: tuple[Progress, ...] = ()
    awaited: tuple[Await, ...] = ()
    finds: tuple[Find, ...] = ()
    pulls: tuple[tuple[str, int], ...] = ()
    offload: OffloadOrders = NO_OFFLOAD

    def __bool__(self) -> bool:
        return any(astuple(self)[3:-1]) or self.offload != NO_OFFLOAD


class Results(_Parts, frozen=True):
    """What ended since the last call. Every request ordered comes back exactly once.

    No peer or copy touches the blocks of ``received`` requests any more; in ``failed``, with the reason, are
    those without valid KV. ``offload`` has at most one report of each rank. ``settled`` are awaited handles
    that the peer holds, or never will. ``ragged`` are those of ``received`` whose windows may begin with a
    block that is not full: blocks of the peer end elsewhere. Rank 0 reports both, and what was ``found``.
    """

    sent: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    failed: Mapping[str, Reason] = {}
    offload: tuple[OffloadReport, ...] = ()
    settled: tuple[str, ...] = ()
    found: tuple[Found, ...] = ()
    ragged: tuple[str, ...] = ()


@dataclass
class OrdersDraft:
    """Orders in the making, named as in ``Orders``; ``awaited`` by handle, since each replaces the last.

    ``step`` is that of the orders taken last, with which the device was given everything known so far.
    """

    directory: list[RankAddress]
    clock: InitVar[Callable[[], float] | None] = None
    notes: list[Record] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    let_go: list[LetGo] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    withdrawn: list[Withdraw] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    awaited: dict[str, Await] = field(default_factory=dict)
    finds: list[Find] = field(default_factory=list)
    pulls: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self, clock: Callable[[], float] | None) -> None:
        self._parts = dict(vars(self))
        self._clock = clock
        self.step = 0
        self._logged: set[str] = set()

    def withdraw(self, handle: str, reason: Reason) -> None:
        """Nothing is held under this handle."""
        # Carried out before what is expected: an id that is withdrawn may be used again in the same step.
        if handle in self.expected:
            self.expected.remove(handle)
        self.withdrawn.append(Withdraw(handle, reason.after("no KV comes under this handle: ")))

    def note(self, event: str, handle: str, request_id: str, number: int = 0) -> None:
        """Record what happens now, for the timeline of rank 0."""
        if self._clock is not None:
            self.notes.append((self._clock(), event, handle, request_id, 0, number))

    def warn(self, reason: str, text: str, *values: object) -> None:
        """Count a failure, and log the first of its reason."""
        self.failures.append(reason)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning(
                text + " (further ones are only counted, as failures with reason %s)", *values, reason
            )

    def take(self) -> Orders:
        """The orders since the last call."""
        self.step += 1
        if not any(self._parts.values()):
            return Orders(step=self.step)
        taken: dict[str, Any] = {name: tuple(part) for name, part in self._parts.items() if part}
        if self.awaited:
            taken["awaited"] = tuple(self.awaited.values())
        for part in self._parts.values():
            part.clear()
        return Orders(step=self.step, **taken)


def blocks_of(
    groups: Sequence[KVCacheGroup], block_ids: BlockIdsByGroup, first_token: int, end_token: int
) -> tuple[GroupBlocks, ...]:
    """The blocks of every group that hold tokens ``first_token`` to ``end_token - 1``."""
    made = []
    for index, (group, ids) in enumerate(zip(groups, block_ids, strict=True)):
        if not group.has_cache:
            continue
        if group.is_state:
            made.append(GroupBlocks(index, 0, tuple(ids[-1:])))
            continue
        first = first_token // group.block_size
        end = div_ceil(end_token, group.block_size)
        made.append(GroupBlocks(index, first, tuple(ids[first:end])))
    return tuple(made)


class Reports:
    """Requests and handles that are over, until they are taken. ``wake`` is called for each of them."""

    def __init__(self, rank: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._rank = rank
        self._ended: deque[tuple[str, str, Reason | None]] = deque()
        self._found: deque[Found] = deque()

    def sent(self, request_id: str) -> None:
        """No peer reads the blocks of a held request any more."""
        self._add("sent", request_id)

    def received(self, request_id: str, error: Reason | None) -> None:
        """No peer writes to the blocks of a loaded request any more; ``error`` states why it failed."""
        self._add("received", request_id, error)

    def settled(self, handle: str) -> None:
        """The peer holds what is awaited, or never will: rank 0 reports it for all ranks."""
        if self._rank == 0:
            self._add("settled", handle)

    def ragged(self, request_id: str) -> None:
        """A request that is received next may have blocks of windows that are not full.

        Every rank reports it: a pipeline rank knows of the windows of its own layers alone.
        """
        self._add("ragged", request_id)

    def found(self, found: Found) -> None:
        """What came of asking a peer for KV by name."""
        self._found.append(found)
        self.wake()

    def take(self) -> Results:
        """What was reported since the last call."""
        if not self._ended and not self._found:
            return Results()
        named: dict[str, list[str]] = {"sent": [], "received": [], "settled": [], "ragged": []}
        failed: dict[str, Reason] = {}
        found: list[Found] = []
        # No lock: the other thread appends meanwhile.
        while self._ended:
            what, name, error = self._ended.popleft()
            named[what].append(name)
            if error is not None:
                failed[name] = error
        while self._found:
            found.append(self._found.popleft())
        lists: dict[str, Any] = {what: tuple(names) for what, names in named.items()}
        return Results(failed=failed, found=tuple(found), **lists)

    def _add(self, what: str, name: str, error: Reason | None = None) -> None:
        self._ended.append((what, name, error))
        self.wake()
