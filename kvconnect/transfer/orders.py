"""The values that the halves exchange with each step: orders and results, and their collectors.

Some serving stacks send these values between processes: plain, picklable, and as small as the change itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import msgspec
from msgspec.structs import asdict, astuple

from kvconnect.addresses import RankAddress
from kvconnect.cache.identity import Naming, Prefix
from kvconnect.cache.specs import KVCacheGroup, div_ceil
from kvconnect.outcome import Outcome, Reason
from kvconnect.plan.blocks import BlockIdsByGroup, Count, GroupBlocks, Index
from kvconnect.timeline import Record

logger = logging.getLogger(__name__)


PeerKey = tuple[str, str, int]
"""A remote engine as a request names it: its id, empty for any at the address, host and port of rank 0."""


class _Parts(msgspec.Struct, frozen=True):
    """A message of lists; false if all are empty."""

    def __bool__(self) -> bool:
        return any(astuple(self))


class Progress(msgspec.Struct, frozen=True):
    """Progress of the prefill of an expected handle: ``computed_tokens`` of ``num_tokens``, which only grow.

    The device was given these tokens before this order was made. ``groups``: the blocks new since the last
    order of this handle, of every group that keeps tokens; the last block may hold tokens not computed yet.
    """

    handle: str
    num_tokens: int
    computed_tokens: int
    groups: tuple[GroupBlocks, ...] = ()


class Withdraw(msgspec.Struct, frozen=True):
    """P will hold no request under this handle: pending fetches of it fail with ``reason``."""

    handle: str
    reason: Reason


class Hold(msgspec.Struct, frozen=True):
    """Hold these blocks until they were fetched or their lease is over; then report the request sent.

    The device computes the last of the tokens in ``step``, as the orders of steps are numbered. D receives
    the ``attachment``, at most ``MAX_ATTACHMENT_BYTES``, once all KV has arrived.
    """

    request_id: str
    handle: str
    num_tokens: int
    groups: tuple[GroupBlocks, ...]
    step: int
    attachment: bytes = b""


class Find(msgspec.Struct, frozen=True):
    """Look up at a peer how many tokens of a prefix, at most ``max_tokens``, it keeps."""

    request_id: str
    peer: PeerKey
    prefix: Prefix
    max_tokens: int


class Found(msgspec.Struct, frozen=True):
    """The result of a ``Find``: the peer's ``num_tokens`` in host memory, ``start_tokens`` included, or 0.

    ``seconds``: their time on the link, infinite if unknown. ``disk_tokens``, ``disk_s``: the same with the
    peer's disk. ``naming``: the peer's, if it differs from the lookup's. ``error``: why the lookup failed;
    ``is_busy``: it fails for this request only.
    """

    request_id: str
    num_tokens: int = 0
    seconds: float = 0.0
    disk_tokens: int = 0
    disk_s: float = 0.0
    naming: Naming | None = None
    error: Reason | None = None
    is_busy: bool = False


class Park(msgspec.Struct, frozen=True, array_like=True):
    """Rows of host memory, of one cache group, that a parked load fills; then report the job parked."""

    job: int
    group: Index
    names: tuple[bytes, ...]
    rows: tuple[Count, ...]


class Load(msgspec.Struct, frozen=True):
    """Fetch these blocks from a peer, then report the request received or failed.

    ``num_tokens``: exactly what the peer must hold. ``refusal``: fetch no block, and report the request
    failed with this reason. ``prefix``: the peer first pins the rows of these names under ``handle``, which D
    made. D has the tokens before ``first_token``. ``parks``: fill these rows in place of blocks, and report
    only their jobs; a block id is then the number of its row, plus one. ``wants_outcome``: also report the
    outcome.
    """

    request_id: str
    handle: str
    peer: PeerKey
    num_tokens: int
    groups: tuple[GroupBlocks, ...]
    refusal: Reason | None = None
    prefix: Prefix | None = None
    first_token: int = 0
    parks: tuple[Park, ...] = ()
    wants_outcome: bool = False


class Await(msgspec.Struct, frozen=True):
    """A request that may fetch under this handle waits for blocks: renew the peer's lease meanwhile.

    Ends with a ``Load`` or a ``LetGo`` of the handle; repeated if a field changes. With ``reports`` the
    handle is reported settled, once, when the peer holds its request or never will.
    """

    handle: str
    peer: PeerKey
    reports: bool = False


class LetGo(msgspec.Struct, frozen=True):
    """Release a handle on a peer: D will not fetch under it. Has no result."""

    handle: str
    peer: PeerKey


class NamedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of the device's prefix cache and the names of their contents, pairwise, of one cache group.

    The device was given what they hold before the step of these orders.
    """

    group: Index
    block_ids: tuple[Count, ...]
    names: tuple[bytes, ...]


class RowCopies(msgspec.Struct, frozen=True, array_like=True):
    """Logical blocks of one cache group and their rows, pairwise.

    A row holds the pages of one block in all layers of the group, in its row class (``offload.budgets``).
    """

    group: Index
    block_ids: tuple[Count, ...]
    rows: tuple[Count, ...]


class Store(msgspec.Struct, frozen=True):
    """Copy blocks to rows; then report the job stored or failed.

    The worker reads the blocks before the step of this order, which may overwrite them; they hold what steps
    before it computed. ``hashes`` name the contents. ``keep``: also write the rows to the lower tiers, and
    report the job kept once no tier reads the rows any more. ``footers``: none or one per content, the tokens
    that it stands for, kept on disk with the row.
    """

    job: int
    copies: RowCopies
    hashes: tuple[bytes, ...]
    keep: bool = False
    footers: tuple[bytes, ...] = ()


class Restore(msgspec.Struct, frozen=True):
    """Copy rows to the blocks of a waiting request, then report it received or failed.

    With a ``refusal`` no row is copied, and the request is reported failed with that text.
    """

    request_id: str
    copies: tuple[RowCopies, ...]
    refusal: str = ""


class Seek(msgspec.Struct, frozen=True):
    """Ask a tier without an index on this node which of these contents it has, then report them."""

    job: int
    tier: str
    group: Index
    hashes: tuple[bytes, ...]


class TierFetch(Seek, frozen=True):
    """Read contents from a lower tier into rows, then report the contents that are missing there."""

    rows: tuple[Count, ...]


class OffloadOrders(_Parts, frozen=True):
    """The orders for the tiers below the device's memory.

    ``held_rows``: by row class, how many rows of host memory have content after these orders; empty without
    orders. ``disk_pins``: contents, there or not yet, that the disk must keep (true) or need not keep any
    more. ``actions``: session actions, outcomes and counts, for the metrics. ``pinned``: the bytes that
    sessions pin in each tier, if changed.
    """

    stores: tuple[Store, ...] = ()
    restores: tuple[Restore, ...] = ()
    fetches: tuple[TierFetch, ...] = ()
    seeks: tuple[Seek, ...] = ()
    clear: bool = False
    """Drop all contents of the lower tiers, before all other orders."""
    held_rows: tuple[Count, ...] = ()
    disk_pins: tuple[tuple[Index, bytes, bool], ...] = ()
    actions: tuple[tuple[str, str, int], ...] = ()
    pinned: tuple[tuple[str, int], ...] = ()


CHANGES_AT_ONCE = 2048
"""Changes per report: a tier that recovers its contents at start has a million, a step some milliseconds."""


class TierChange(msgspec.Struct, frozen=True, array_like=True):
    """Contents that a lower tier of one rank has gained or lost.

    ``footers``: none, or one per ``added`` content, of contents from before the tier's start.
    """

    tier: str
    group: Index
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    footers: tuple[bytes, ...] = ()


class OffloadReport(msgspec.Struct, frozen=True):
    """The results of one rank's tiers since its last report. Jobs come back exactly once in each list.

    ``done`` has by job the hashes whose rows are void, usually none, and of a ``Seek`` those that the tier
    has. ``kept``: jobs whose rows no lower tier reads any more. ``cleared`` counts the clear orders carried
    out: ``changes`` are later than these. While a rank ``is_recovering``, its tiers have more to report:
    contents of before their start, or changes that one report has no room for.
    """

    rank: int
    cleared: int = 0
    done: Mapping[int, tuple[bytes, ...]] = {}
    kept: tuple[int, ...] = ()
    changes: tuple[TierChange, ...] = ()
    is_recovering: bool = False

    def __bool__(self) -> bool:
        return any(astuple(self)[2:])


NO_OFFLOAD = OffloadOrders()
"""No orders; a comparison with this value costs no call."""


class Orders(_Parts, frozen=True):
    """One step's orders. ``directory`` is sent once, when the addresses of all ranks are known.

    ``expected``: handles whose prefill is under way, so that their fetches wait; a ``Hold`` or a ``Withdraw``
    of the handle always follows, with ``Progress`` before it for long prompts. ``preempted``: expected
    handles that lost their blocks, and begin anew. ``aborted``: requests that ended during their load, which
    is cancelled, and reported once its blocks are quiescent. ``failures``: reasons to count, as the scheduler
    half has no metrics. Orders of one handle are carried out in this sequence: withdrawn, expected,
    preempted, progress, holds; and loads or let_go before awaited. ``step`` numbers the orders of one
    scheduler half: the device was given all that they name before step ``step``. ``zeroes_loads``: the step
    may still zero blocks that its loads and restores fill. ``notes``: records for the timeline of rank 0.
    ``pulls``: outcomes of pulls and loaded tokens, for the metrics. ``named``: blocks that peers may fetch by
    name from now on; ``reused``: named blocks that this step, or a load or restore of it, may overwrite, also
    of those in ``named``. A worker takes ``reused`` before the step's kernels are launched. ``receipts``:
    those of requests that ended, and ``refused``: outcomes of requests for which nothing was ordered, both
    for the inspection of rank 0.
    """

    step: int = 0
    zeroes_loads: bool = False
    notes: tuple[Record, ...] = ()
    reused: tuple[Count, ...] = ()
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
    named: tuple[NamedBlocks, ...] = ()
    receipts: tuple[dict[str, Any], ...] = ()
    refused: tuple[Outcome, ...] = ()
    offload: OffloadOrders = NO_OFFLOAD

    def __bool__(self) -> bool:
        return any(astuple(self)[4:-1]) or self.offload != NO_OFFLOAD


class Results(_Parts, frozen=True):
    """The requests and handles that ended since the last call; every ordered request comes back exactly once.

    No peer reads the blocks of ``sent`` requests any more, and no peer or copy touches those of ``received``
    ones; ``failed`` has those without valid KV, with the reason. ``offload``: at most one report per rank.
    ``settled``: awaited handles that the peer holds, or never will. ``ragged``: received requests whose
    windows may begin with a partly filled block, as the peer's blocks end elsewhere; a pipeline rank knows
    the windows of its own layers only. ``unsent``: sent requests that no peer was served, with the reason.
    ``attachments``: what came with received requests. ``wanted``: see ``RankTraits.reports_fetches``.
    ``read``: blocks of the prefix cache that peers read by name, to be reused after all others. ``outcomes``:
    of received and parked requests, by rank, where the order wants them. Rank 0 reports ``settled``,
    ``found`` and ``read``.
    """

    sent: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    failed: Mapping[str, Reason] = {}
    offload: tuple[OffloadReport, ...] = ()
    settled: tuple[str, ...] = ()
    found: tuple[Found, ...] = ()
    ragged: tuple[str, ...] = ()
    unsent: Mapping[str, Reason] = {}
    attachments: Mapping[str, bytes] = {}
    wanted: tuple[tuple[str, int], ...] = ()
    read: tuple[int, ...] = ()
    outcomes: tuple[Outcome, ...] = ()


@dataclass
class OrdersDraft:
    """Collects orders, by the names in ``Orders``; ``awaited`` by handle, as each replaces the one before.

    ``step`` is that of the orders taken last: the device was given all that was known by then.
    """

    directory: list[RankAddress]
    clock: InitVar[Callable[[], float] | None] = None
    zeroes_loads: InitVar[bool] = False
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
    named: list[NamedBlocks] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    receipts: list[dict[str, Any]] = field(default_factory=list)
    refused: list[Outcome] = field(default_factory=list)

    def __post_init__(self, clock: Callable[[], float] | None, zeroes_loads: bool) -> None:
        self._parts = dict(vars(self))
        self._clock, self._zeroes_loads = clock, zeroes_loads
        self.step = 0
        self._logged: set[str] = set()

    def withdraw(self, handle: str, reason: Reason) -> None:
        """Withdraw a handle under which P will hold no request."""
        # Withdrawals are carried out before expectations: a withdrawn id may be used again in the same step.
        if handle in self.expected:
            self.expected.remove(handle)
        self.withdrawn.append(Withdraw(handle, reason.after("no KV comes under this handle: ")))

    def note(self, event: str, handle: str, request_id: str, number: int = 0) -> None:
        """Record an event, at the present time, for the timeline of rank 0."""
        if self._clock is not None:
            self.notes.append((self._clock(), event, handle, request_id, 0, number))

    def warn(self, reason: str, text: str, *values: object) -> None:
        """Count a failure, and log the first of its reason."""
        self.failures.append(reason)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning(text + " (further ones are only counted, as %s)", *values, reason)

    def computed(self, request_id: str, peer: PeerKey, reason: Reason) -> None:
        """Count and report a request that is computed here, as nothing of ``peer`` is loaded for it."""
        engine_id, host, port = peer
        outcome = Outcome(request_id, engine_id, (host, port), "lease", 0, 0, 0.0, reason=reason)
        self.refused.append(outcome)
        self.warn(reason.cause.value, "%s; it is computed here", outcome)

    def take(self) -> Orders:
        """The orders since the last call."""
        self.step += 1
        taken: dict[str, Any] = {name: tuple(part) for name, part in self._parts.items() if part}
        if self.awaited:
            taken["awaited"] = tuple(self.awaited.values())
        for part in self._parts.values():
            part.clear()
        return Orders(step=self.step, zeroes_loads=self._zeroes_loads, **taken)


def blocks_of(
    groups: Sequence[KVCacheGroup], block_ids: BlockIdsByGroup, first_token: int, end_token: int
) -> tuple[GroupBlocks, ...]:
    """By group, the blocks of tokens ``first_token`` to ``end_token - 1``; of a state, its last block."""
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
    """Collects results until they are taken; calls ``wake`` for each."""

    def __init__(self, rank: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.has_wanted = False
        """Whether fetches that wait for their prefill are reported."""
        self._rank = rank
        self._new: deque[Results] = deque()
        # As keys: an idle stack takes no results, and peers may read the same blocks many times.
        self._read: dict[int, None] = {}

    def add(self, results: Results) -> None:
        """Add results, which are taken together."""
        self._new.append(results)
        self.wake()

    def settled(self, handle: str) -> None:
        """The peer holds an awaited handle's request, or never will: rank 0 reports it for all ranks."""
        if self._rank == 0:
            self.add(Results(settled=(handle,)))

    def read(self, block_ids: Iterable[int]) -> None:
        """A peer reads these blocks of the prefix cache: rank 0 reports it for all ranks."""
        if self._rank == 0:
            self._read.update(dict.fromkeys(block_ids))

    def take(self) -> Results:
        """The results since the last call."""
        if not self._new and not self._read:
            return Results()
        read, self._read = self._read, {}
        found = [Results(read=tuple(read))]
        # No lock: the transfer thread appends meanwhile, which a deque allows.
        while self._new:
            found.append(self._new.popleft())
        return joined(found)


def joined(parts: Iterable[Results]) -> Results:
    """Results of one rank or of several as one; of two reasons for one request the later counts."""
    made: dict[str, Any] = {}
    for part in parts:
        for name, own in asdict(part).items():
            if isinstance(own, tuple):
                made.setdefault(name, []).extend(own)
            else:
                made.setdefault(name, {}).update(own)
    made = {name: tuple(own) if isinstance(own, list) else own for name, own in made.items()}
    return Results(**made)
