"""The tiers below host memory, as one rank uses them: each job goes there and comes back, or is given up.

A tier answers in its own time. What it does not answer in time is reported failed, and its rows stay held
until it does: a tier that reads or writes late can then harm nobody.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvconnect.errors import LocalError
from kvconnect.metrics import OffloadMetrics
from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.tier import Content, LowerTier, TierNews, TierRow
from kvconnect.offload.worker.held_rows import HeldRows, Place
from kvconnect.offload.worker.open_jobs import OpenJobs
from kvconnect.orders import Fetch, RowCopies, Seek, TierChange

logger = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 20.0


@dataclass
class _Keep:
    """A job whose rows are written to every tier. ``refused`` counts how many do not have a hash."""

    number: int
    left: int
    lost: tuple[bytes, ...]
    refused: Counter[bytes] = field(default_factory=Counter)


@dataclass
class _Errand:
    """What one tier was asked to do. ``number`` is the open job it is for."""

    number: int
    group: int
    hashes: tuple[bytes, ...]
    places: tuple[Place, ...]
    row_bytes: int
    began_s: float
    deadline_s: float
    keep: _Keep | None = None
    missing: tuple[bytes, ...] = ()
    given_up: bool = False


class LowerTiers:
    """All lower tiers of a rank. One thread owns it.

    Args:
        tiers: in the order in which they are written.
        arena: the rows.
        jobs: where what ended is reported.
        held: where rows are put that a tier did not let go of in time.
        metrics: what was moved, and what went wrong.
        write_timeout_s: how long a tier may take to write the rows of a job.
        read_timeout_s: how long it may take to read them, or to say whether it has them.
    """

    def __init__(
        self,
        tiers: Sequence[LowerTier],
        arena: RowArena,
        jobs: OpenJobs,
        held: HeldRows,
        metrics: OffloadMetrics,
        *,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._arena, self._jobs, self._held, self._metrics = arena, jobs, held, metrics
        self._write_timeout_s, self._read_timeout_s = write_timeout_s, read_timeout_s
        self._numbers = itertools.count(1)
        self._errands: dict[tuple[str, str, int], _Errand] = {}
        self._next_deadline_s: float | None = None
        self._troubled: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        """Errands that were not answered, those given up included."""
        return len(self._errands)

    @property
    def tiers(self) -> tuple[LowerTier, ...]:
        """All of them, in order."""
        return tuple(self._tiers.values())

    @property
    def next_deadline_s(self) -> float | None:
        """When ``advance`` has something to do though no tier has news."""
        return self._next_deadline_s

    def keep(
        self,
        number: int,
        copies: RowCopies,
        hashes: Sequence[bytes],
        now: float,
        *,
        lost: Sequence[bytes] = (),
    ) -> None:
        """Write rows to all tiers; the job ends once none of them reads the rows any more.

        ``hashes`` name what is in the rows of ``copies``. Those in ``lost`` are not kept in any case.
        """
        if not self._tiers or not hashes:
            self._jobs.end(number, (*hashes, *lost))
            return
        keep = _Keep(number, len(self._tiers), lost=tuple(lost))
        memory = self._rows(copies.group, hashes, copies.rows)
        for tier in self.tiers:
            errand = self._errand(number, copies.group, hashes, copies.rows, now, self._write_timeout_s)
            errand.keep = keep
            self._send(tier, "write", errand, functools.partial(_write, tier, memory))

    def fetch(self, number: int, order: Fetch, now: float) -> None:
        """Read contents into rows; the job ends once the tier does not write them any more."""
        tier = self._tiers.get(order.tier)
        if tier is None:
            self._unknown(order.tier)
            self._jobs.fail(number, "there is no such tier")
            return
        # A row in somebody's hands must not get bytes of which nobody could say whose they are.
        places = self._places(order.group, order.rows)
        free = [index for index, place in enumerate(places) if place not in self._held]
        hashes = [order.hashes[index] for index in free]
        rows = [order.rows[index] for index in free]
        errand = self._errand(number, order.group, hashes, rows, now, self._read_timeout_s)
        errand.missing = tuple(set(order.hashes) - set(hashes))
        if not hashes:
            self._jobs.end(number, errand.missing)
            return
        memory = self._rows(order.group, hashes, rows)
        self._send(tier, "read", errand, lambda job: tier.read(job, memory))

    def seek(self, number: int, order: Seek, now: float) -> None:
        """Ask a tier what it has; the job ends with its answer."""
        tier = self._tiers.get(order.tier)
        if tier is None:
            self._unknown(order.tier)
            self._jobs.fail(number, "there is no such tier")
            return
        errand = self._errand(number, order.group, order.hashes, (), now, self._read_timeout_s)
        contents = [(order.group, hash_) for hash_ in order.hashes]
        self._send(tier, "seek", errand, lambda job: tier.seek(job, contents))

    def clear(self, now: float) -> None:
        """Have all tiers forget everything that they were given before."""
        for tier in self.tiers:
            self._ask(tier, "clear", tier.clear)
            # What was added before is gone, and whoever ordered this knows.
            self._take(tier, self._poll(tier), now, tell_changes=False)

    def advance(self, now: float) -> bool:
        """Take what the tiers have to tell, and give up what is late. Whether there was anything."""
        progress = False
        for tier in self.tiers:
            news = self._poll(tier)
            if news:
                progress = True
                self._take(tier, news, now)
        if self._next_deadline_s is not None and now >= self._next_deadline_s:
            progress = True
            self._give_up_late(now)
        return progress

    def replace(self, tiers: Sequence[LowerTier]) -> None:
        """Use these from now on, in place of those that were closed."""
        self._tiers = {tier.name: tier for tier in tiers}

    def close(self, now: float, *, tell_changes: bool = True) -> None:
        """Close all tiers. Whatever they did not do fails."""
        for tier in self.tiers:
            quiet: list[bool] = []
            self._ask(tier, "close", functools.partial(_close, tier, quiet))
            self._take(tier, self._poll(tier), now, tell_changes=tell_changes)
            for key in [key for key in self._errands if key[0] == tier.name]:
                self._give_up(key, "closed")
                errand = self._errands.pop(key)
                if quiet == [True]:
                    self._held.release(errand.places)
        self._next_deadline_s = None

    def _take(self, tier: LowerTier, news: TierNews, now: float, *, tell_changes: bool = True) -> None:
        for reason, times in news.failures.items():
            self._metrics.failures.labels(reason).inc(times)
        for verb, answers in (("write", news.written), ("read", news.read), ("seek", news.found)):
            for job, contents in answers.items():
                self._answered((tier.name, verb, job), contents, now)
        if tell_changes and (news.added or news.removed):
            self._jobs.tell(_changes(tier.name, news))

    def _answered(self, key: tuple[str, str, int], contents: Iterable[Content], now: float) -> None:
        errand = self._errands.pop(key, None)
        if errand is None:
            self._trouble(key[0], "answer", "an answer to job %d that was not asked", key[2])
            return
        if errand.given_up:
            self._held.release(errand.places)
            return
        name, verb, _ = key
        told = {hash_ for group, hash_ in contents if group == errand.group}
        named = [hash_ for hash_ in errand.hashes if hash_ in told]
        if verb == "seek":
            self._jobs.end(errand.number, named)
            return
        moved = len(errand.hashes) - len(named)
        good, bad = ("kept", "unkept") if verb == "write" else ("fetched", "missed")
        self._metrics.moved(good, name, moved, moved * errand.row_bytes, now - errand.began_s)
        self._metrics.moved(bad, name, len(named), len(named) * errand.row_bytes)
        if errand.keep is None:
            self._jobs.end(errand.number, (*named, *errand.missing))
        else:
            self._kept(errand.keep, named)

    def _kept(self, keep: _Keep, refused: Iterable[bytes]) -> None:
        keep.left -= 1
        keep.refused.update(refused)
        if not keep.left:
            nowhere = [hash_ for hash_, times in keep.refused.items() if times >= len(self._tiers)]
            self._jobs.end(keep.number, (*nowhere, *keep.lost))

    def _give_up_late(self, now: float) -> None:
        waiting = [key for key, errand in self._errands.items() if not errand.given_up]
        for key in waiting:
            if now >= self._errands[key].deadline_s:
                self._trouble(key[0], key[1], "no answer in time to an order to %s", key[1])
                self._give_up(key, "timeout")
        self._next_deadline_s = min(
            (errand.deadline_s for errand in self._errands.values() if not errand.given_up), default=None
        )

    def _give_up(self, key: tuple[str, str, int], why: str) -> None:
        """End an errand as failed. Its rows are held before anybody can hear of it."""
        errand = self._errands[key]
        if errand.given_up:
            return
        errand.given_up = True
        self._held.hold(errand.places)
        self._metrics.failures.labels(f"{key[0]}_{key[1]}_{why}").inc()
        if errand.keep is None:
            self._jobs.fail(errand.number, why)
        else:
            self._kept(errand.keep, errand.hashes)

    def _errand(
        self,
        number: int,
        group: int,
        hashes: Sequence[bytes],
        rows: Sequence[int],
        now: float,
        timeout_s: float,
    ) -> _Errand:
        row_bytes = self._arena.plan.row_class(group).row_bytes
        places = self._places(group, rows)
        return _Errand(number, group, tuple(hashes), places, row_bytes, now, now + timeout_s)

    def _send(self, tier: LowerTier, verb: str, errand: _Errand, begin: Callable[[int], None]) -> None:
        job = next(self._numbers)
        key = (tier.name, verb, job)
        self._errands[key] = errand
        deadline_s = self._next_deadline_s
        self._next_deadline_s = min(
            errand.deadline_s, errand.deadline_s if deadline_s is None else deadline_s
        )
        try:
            begin(job)
        except LocalError as error:
            # It did not begin.
            self._trouble(tier.name, verb, "an order to %s was refused: %s", verb, error)
            self._give_up(key, "refused")
            self._held.release(self._errands.pop(key).places)
        except Exception:
            # Nobody knows how far it got: the rows are held until it answers or is closed.
            self._trouble(tier.name, verb, "an error of its own in %s", verb, exc_info=True)
            self._give_up(key, "refused")

    def _poll(self, tier: LowerTier) -> TierNews:
        news: list[TierNews] = []
        self._ask(tier, "poll", lambda: news.append(tier.poll()))
        return news[0] if news else TierNews()

    def _ask(self, tier: LowerTier, verb: str, call: Callable[[], None]) -> bool:
        """Call a tier. False: it raised, which is its bug, logged once and counted."""
        try:
            call()
        except Exception:
            self._trouble(tier.name, verb, "an error of its own in %s", verb, exc_info=True)
            self._metrics.failures.labels(f"{tier.name}_internal").inc()
            return False
        return True

    def _unknown(self, name: str) -> None:
        self._trouble(name, "unknown", "orders for it, but there is no such tier")
        self._metrics.failures.labels("offload_unknown_tier").inc()

    def _trouble(self, name: str, kind: str, text: str, *about: object, exc_info: bool = False) -> None:
        """Say once of each tier and kind what went wrong there; the count says how often."""
        if (name, kind) not in self._troubled:
            self._troubled.add((name, kind))
            logger.error("lower tier %s: " + text, name, *about, exc_info=exc_info)

    def _places(self, group: int, rows: Sequence[int]) -> tuple[Place, ...]:
        index = self._arena.plan.class_of[group]
        return tuple((index, row) for row in rows)

    def _rows(self, group: int, hashes: Sequence[bytes], rows: Sequence[int]) -> list[TierRow]:
        return [
            TierRow(group, hash_, self._arena.row(group, row))
            for hash_, row in zip(hashes, rows, strict=True)
        ]


def _write(tier: LowerTier, memory: Sequence[TierRow], job: int) -> None:
    tier.write(job, memory)


def _close(tier: LowerTier, quiet: list[bool]) -> None:
    quiet.append(tier.close())


def _changes(name: str, news: TierNews) -> list[TierChange]:
    """What a tier has got and lost, by group."""
    groups: dict[int, tuple[list[bytes], list[bytes]]] = {}
    for side, contents in enumerate((news.added, news.removed)):
        for group, hash_ in contents:
            groups.setdefault(group, ([], []))[side].append(hash_)
    return [
        TierChange(name, group, tuple(added), tuple(removed)) for group, (added, removed) in groups.items()
    ]
