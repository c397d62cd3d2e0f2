"""The prefix lookup: the tokens of a prompt that host memory can restore, after fetches from lower tiers.

A hit is promised only once all its contents are in host memory, where they stay pinned: a failing lower tier
only shortens the hit. Repeated lookups cost nothing until something has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

from kvconnect.errors import LocalError
from kvconnect.offload.index.tier_index import ContentState
from kvconnect.offload.scheduler.hit_requirements import HitGroup
from kvconnect.offload.scheduler.host import Host, Job, JobKind, Lookup, OffloadRequest, Pins
from kvconnect.offload.tier import SOUGHT, Content, lower_tier_names
from kvconnect.transfer.orders import Restore, RowCopies, Seek, TierFetch

_REST_WAITS = 10
"""A tier that does not answer within ``wait_s`` is not asked for so many ``wait_s``, unless it answers."""

_NEGATIVE_TTL_S = 0.05
"""How long a lookup without a hit is not repeated, although other requests store contents meanwhile: nearly
each step stores some, and a search over a long prompt's windows takes milliseconds."""


class PrefixLookup:
    """Finds hits, and orders fetches of their missing contents from lower tiers to host memory."""

    def __init__(self, host: Host) -> None:
        self._host, self._tiers = host, lower_tier_names(host.config)
        self._min_tokens, self._wait_s = max(1, host.config.min_tokens), host.config.wait_s
        self._waiters: dict[Content | int, list[Lookup]] = {}
        self._stuck: set[Content | int] = set()
        self._resting: dict[str, float] = {}
        self.restoring: dict[str, Pins] = {}
        """By request whose restore is under way, the contents pinned for it."""
        self._version = 0  # Grows whenever contents arrive in host memory.

    def __len__(self) -> int:
        return len(self._waiters)

    # Lookups of requests

    def find(self, request: OffloadRequest, start_tokens: int, now: float) -> int | None:
        """The tokens beyond ``start_tokens`` that can be restored; None: fetches are under way, ask again."""
        num_tokens, is_first = request.view.num_tokens, request.lookup is None
        lookup = request.lookup = request.lookup or Lookup(now + self._wait_s)
        if (lookup.start_tokens, lookup.num_tokens) == (start_tokens, num_tokens) and (
            lookup.length or lookup.version == self._version or now < lookup.deadline + _NEGATIVE_TTL_S
        ):
            return lookup.length
        if lookup.waits_for:
            if now < lookup.deadline:
                return None
            self._host.count("offload_wait_timeout")
            for tier in lookup.waits_for.values():
                self._resting[tier] = now + _REST_WAITS * self._wait_s
            self._stuck.update(lookup.waits_for)
            self._abandon(lookup)
        boundary = self._search(request, lookup, start_tokens, now, seeks=is_first)
        if boundary is None:
            return None
        length = boundary - start_tokens
        lookup.length = length = length if length >= self._min_tokens else 0
        lookup.start_tokens, lookup.num_tokens, lookup.version = start_tokens, num_tokens, self._version
        lookup.deadline = now
        former, lookup.pins = lookup.pins, {}
        if length:
            needed = self._needed(request, start_tokens, boundary)
            lookup.pins = {group.group: names for group, _, names in needed}
            for index, names in lookup.pins.items():
                self._host.index.pin(index, names)
            request.sources = self._sources(lookup)
        self._host.unpin(former)
        return length

    def withdraw(self, request: OffloadRequest) -> None:
        """Take back a promise: its contents may be gone."""
        if request.lookup is not None and request.lookup.num_tokens:
            self._host.unpin(request.lookup.pins)
            request.lookup.num_tokens = request.lookup.length = 0

    def release(self, request: OffloadRequest) -> None:
        if request.lookup is not None:
            self._abandon(request.lookup)
            self._host.unpin(request.lookup.pins)
            request.lookup = None

    # Restores

    def restore(self, request: OffloadRequest, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Order the restore of the first ``num_tokens`` promised, or have it reported as failed."""
        request_id, lookup = request.view.request_id, request.lookup
        pins = self.restoring[request_id] = {}
        try:
            if lookup is None or num_tokens > lookup.length:
                raise LocalError(f"{num_tokens} tokens are not what was promised")
            start, end = lookup.start_tokens, lookup.start_tokens + num_tokens
            wanted = [
                self._copies(request, group, block_ids[group.group], start, end)
                for group in self._host.requirements.groups
            ]
        except LocalError as error:
            self._host.count("offload_refused")
            self._host.restores.append(Restore(request_id, (), f"it cannot be restored: {error}"))
            return
        if num_tokens == lookup.length:
            # The promised contents stay pinned as they are.
            pins.update(lookup.pins)
            lookup.pins = {}
        else:
            for names, copies in wanted:
                self._host.index.pin(copies.group, names)
                pins[copies.group] = names
        self._host.restores.append(Restore(request_id, tuple(copies for _, copies in wanted if copies.rows)))

    def restored(self, request_id: str, *, failed: bool) -> bool:
        """A load of a request ended; returns whether it was a restore. A failed one drops its contents."""
        pins = self.restoring.pop(request_id, None)
        if pins is None:
            return False
        for group, names in pins.items() if failed else ():
            self._host.index.drop(group, names)
        self._host.unpin(pins)
        return True

    def _copies(
        self, request: OffloadRequest, group: HitGroup, ids: Sequence[int], start: int, end: int
    ) -> tuple[list[bytes], RowCopies]:
        """A group's names and copies for tokens ``start`` to ``end``. Raises ``LocalError``: no such copy."""
        if group.is_state and end % group.block_tokens:
            raise LocalError(f"no state is kept after {end} tokens")
        parts = group.needed(end, start)
        count = sum(map(len, parts))
        names = self._host.names(request.view, group, parts)
        ids = ids[-1:] if group.is_state else [at for part in parts for at in ids[part.start : part.stop]]
        if not len(ids) == len(names) == count:
            raise LocalError(f"cache group {group.group} has {len(ids)} blocks for {count}")
        if (group.is_whole or group.is_state) and 0 in ids:
            raise LocalError(f"cache group {group.group} has no block for some of {end} tokens")
        # A window may be kept for fewer tokens than it is wide.
        names = [name for name, block_id in zip(names, ids, strict=True) if block_id]
        ids = tuple(block_id for block_id in ids if block_id)
        return names, RowCopies(group.group, ids, tuple(self._host.index.rows_of(group.group, names)))

    # Ends of jobs

    def arrived(self, group: int, names: Iterable[bytes], tier: str = "") -> None:
        """Contents are in host memory now: read from ``tier``, or stored from the device if it is empty."""
        self._version += 1
        self._resting.pop(tier, None)
        for name in names if self._waiters or self._stuck else ():
            for lookup in self._ended((group, name)):
                self._host.index.pin(group, [name])
                lookup.pins.setdefault(group, []).append(name)
                if tier:
                    lookup.brought[group, name] = tier

    def lost(self, group: int, names: Iterable[bytes]) -> None:
        for name in names:
            for lookup in self._ended((group, name)):
                lookup.lost.add((group, name))

    def _ended(self, awaited: Content | int) -> Sequence[Lookup]:
        """The lookups that waited for a content, or a seek job."""
        self._stuck.discard(awaited)
        lookups = self._waiters.pop(awaited, ())
        for lookup in lookups:
            lookup.waits_for.pop(awaited, None)
        return lookups

    def fetched(self, job: Job) -> None:
        """All ranks have finished a fetch: contents that every rank has read are ready, others dropped."""
        missing = [name for name in job.hashes if job.stale or name in job.named]
        if job.named:
            self._host.count("offload_fetch_missed")
            self._host.lower.drop(job.tier, job.group, list(job.named))
        if not job.stale:
            fetched = [name for name in job.hashes if name not in job.named]
            self._host.index.commit(job.group, fetched)
            self.arrived(job.group, fetched, job.tier)
        self._host.index.drop(job.group, missing)
        self.lost(job.group, missing)
        self._host.jobs.close(job)

    def found(self, job: Job) -> None:
        """A seek job ended: contents that all ranks found count; those of an overdue job do not."""
        self._host.jobs.close(job)
        if not job.unreported:
            self._resting.pop(job.tier, None)
        num_ranks = self._host.jobs.num_ranks
        found = {(job.group, name) for name, ranks in job.named.items() if ranks == num_ranks}
        for lookup in self._ended(job.number):
            if not job.unreported and not job.stale:
                lookup.found.setdefault(job.tier, set()).update(found)

    def _abandon(self, lookup: Lookup) -> None:
        """Stop waiting."""
        for awaited in lookup.waits_for:
            left = self._waiters[awaited]
            left.remove(lookup)
            if not left:
                del self._waiters[awaited]
        lookup.waits_for.clear()

    # The search

    def _search(
        self, request: OffloadRequest, lookup: Lookup, start_tokens: int, now: float, *, seeks: bool
    ) -> int | None:
        """The end of the hit in host memory, in tokens; None while seeks or fetches may make it longer."""
        limit = self._host.requirements.last_boundary(request.view.num_tokens - 1)
        here, _ = self._longest(request, start_tokens, None)
        if here >= limit or now >= lookup.deadline:
            return here
        self._resting = {tier: until for tier, until in self._resting.items() if until > now}
        if seeks and self._seek(request, lookup, start_tokens):
            return None
        best, junction = self._longest(request, start_tokens, lookup)
        if junction > max(best, start_tokens):
            # Other prompts share this prefix: keep windows and states here for the next one.
            request.junction = junction
        at_least = here if here - start_tokens >= self._min_tokens else start_tokens
        if best - at_least >= self._min_tokens:
            self._bring(request, lookup, start_tokens, best)
            if lookup.waits_for:
                return None
            # No row was free. The hit in host memory may be shorter than before.
            here, _ = self._longest(request, start_tokens, None)
        return here

    def _longest(self, request: OffloadRequest, start_tokens: int, lookup: Lookup | None) -> tuple[int, int]:
        """The longest hit, and its length if all windows and states were there, in tokens.

        With ``lookup``, contents under way to host memory and contents of lower tiers count as there.
        """

        def known(group: HitGroup, first: int, end: int) -> Sequence[bool]:
            names = group.names(self._host.hashes(request.view, group.block_tokens), first, end)
            return self._known(group.group, names, lookup)

        return self._host.requirements.hit(start_tokens, request.view.num_tokens - 1, known)

    def _known(self, group: int, names: Sequence[bytes], lookup: Lookup | None) -> list[bool]:
        states = self._host.index.states(group, names)
        known = [state is ContentState.READY for state in states]
        if lookup is None or all(known):
            return known
        absent = compress(names, [state is ContentState.ABSENT for state in states])
        tiers = self._tiers_of(group, list(absent), lookup)
        for at, (name, state) in enumerate(zip(names, states, strict=True)):
            if state is ContentState.PENDING:
                known[at] = (group, name) not in self._stuck and (group, name) not in lookup.lost
            elif name in tiers:
                known[at] = (group, name) not in lookup.lost
        return known

    def _tiers_of(self, group: int, names: Sequence[bytes], lookup: Lookup) -> dict[bytes, str]:
        """The nearest tier that has each content, without contents that no tier has."""
        found: dict[bytes, str] = {}
        for tier in self._tiers if names else ():
            if tier in SOUGHT:
                answered = lookup.found.get(tier, ())
                has = [(group, name) in answered for name in names] if answered else []
            else:
                has = self._host.lower.has(tier, group, names) if tier not in self._resting else []
            for name in compress(names, has):
                found.setdefault(name, tier)
        return found

    def _needed(
        self, request: OffloadRequest, start_tokens: int, boundary: int
    ) -> Iterator[tuple[HitGroup, tuple[range, ...], list[bytes]]]:
        """By group the positions from ``start_tokens`` on that a hit needs, and their names."""
        for group in self._host.requirements.groups:
            parts = group.needed(boundary, start_tokens)
            yield group, parts, self._host.names(request.view, group, parts)

    def _bring(self, request: OffloadRequest, lookup: Lookup, start_tokens: int, boundary: int) -> None:
        self._host.unpin(lookup.pins)
        missing: dict[tuple[int, str], list[bytes]] = {}
        needed = list(self._needed(request, start_tokens, boundary))
        for group, _, names in needed:
            index = group.group
            by_state: dict[ContentState, list[bytes]] = {state: [] for state in ContentState}
            for name, state in zip(names, self._host.index.states(index, names), strict=True):
                by_state[state].append(name)
            # Pin ready contents before any row is taken: they must not be evicted for missing ones.
            lookup.pins[index] = by_state[ContentState.READY]
            self._host.index.pin(index, lookup.pins[index])
            self._await(lookup, ((index, name) for name in by_state[ContentState.PENDING]))
            for name, tier in self._tiers_of(index, by_state[ContentState.ABSENT], lookup).items():
                missing.setdefault((index, tier), []).append(name)
        coming: dict[int, list[bytes]] = {}
        for (index, tier), names in missing.items():
            taken = self.fetch(index, tier, names)
            coming.setdefault(index, []).extend(taken)
            if len(taken) < len(names):
                self._host.count("offload_rows_short")
            lookup.lost.update((index, name) for name in set(names) - set(taken))
            self._await(lookup, ((index, name) for name in taken), tier)
        if self._host.events is not None:
            for group, parts, _ in needed:
                hashes = self._host.hashes(request.view, group.block_tokens)
                each = ((request.view, hashes, part.start, part.stop) for part in parts)
                self._host.events.describe(group, each, frozenset(coming.get(group.group, ())))

    def fetch(self, group: int, tier: str, names: Sequence[bytes]) -> list[bytes]:
        """Order a tier to read absent contents into host memory; returns those that got a row."""
        taken, rows = self._host.index.reserve(group, names)
        if taken:
            job = self._host.jobs.open(JobKind.FETCH, group, tuple(taken), tier=tier)
            self._host.fetches.append(TierFetch(job.number, tier, group, tuple(taken), tuple(rows)))
        return taken

    def _await(self, lookup: Lookup, awaited: Iterable[Content | int], tier: str = "") -> None:
        for one in awaited:
            lookup.waits_for[one] = tier
            self._waiters.setdefault(one, []).append(lookup)

    def _seek(self, request: OffloadRequest, lookup: Lookup, start_tokens: int) -> bool:
        # Ask only for contents that are neither in host memory nor known in a tier with an index.
        limit = self._host.requirements.last_boundary(request.view.num_tokens - 1)
        for tier in [tier for tier in self._tiers if tier in SOUGHT and tier not in self._resting]:
            for group in self._host.requirements.groups:
                every = range(start_tokens // group.block_tokens, limit // group.block_tokens)
                names = self._host.names(request.view, group, (every,))
                known = self._known(group.group, names, lookup)
                unknown = tuple(name for name, is_known in zip(names, known, strict=True) if not is_known)
                if unknown:
                    job = self._host.jobs.open(JobKind.SEEK, group.group, unknown, tier=tier)
                    self._host.seeks.append(Seek(job.number, tier, group.group, unknown))
                    self._await(lookup, [job.number], tier)
        return bool(lookup.waits_for)

    def _sources(self, lookup: Lookup) -> dict[str, int]:
        """By tier the promised tokens that it brought, counted in the first group."""
        group = (self._host.requirements.whole or self._host.requirements.partial)[0]
        brought = (lookup.brought.get((group.group, name)) for name in lookup.pins[group.group])
        counts = Counter(tier for tier in brought if tier)
        return {tier: min(count * group.block_tokens, lookup.length) for tier, count in counts.items()}
