"""Worker ranks in miniature: they answer late, in any order, and fail; their rows are contents, not bytes.

A row that somebody may write to is busy, and nobody may read it or be given it.
"""

from __future__ import annotations

from kvconnect.transfer.orders import OffloadReport, Results, TierChange

GARBAGE = "garbage"


class Ranks:
    """Worker ranks that carry out orders when ``work`` is called, in any order, and fail now and then."""

    def __init__(self, stack, num_ranks, rng, *, fail=0.0, tiers=(), lag=0.5) -> None:
        self.stack, self.rng, self.fail, self.lag = stack, rng, fail, lag
        self.tiers = tiers
        self.rows = [{} for _ in range(num_ranks)]
        self.lower = [{tier: {} for tier in tiers} for _ in range(num_ranks)]
        self.todo = [[] for _ in range(num_ranks)]
        self.awaited: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.num_restored = self.cleared = 0
        self.silent: set[int] = set()

    def place(self, group, row):
        return (self.stack.half.plan.class_of[group], row)

    def before_step(self, orders) -> None:
        self.cleared += orders.clear
        if orders.clear:
            for lower in self.lower:
                for kept in lower.values():
                    kept.clear()
            for todo in self.todo:
                todo[:] = [("keep", job[1], job[2], ()) if job[0] == "keep" else job for job in todo]
                for at, job in enumerate(todo):
                    if job[0] == "store":
                        todo[at] = (*job[:4], "cleared")
        for store in orders.stores:
            group, ids, rows = store.copies.group, store.copies.block_ids, store.copies.rows
            content = []
            for block_id, name in zip(ids, store.hashes, strict=True):
                held = self.stack.read(group, block_id)
                assert held == self.stack.expected[group, name], (group, block_id, held)
                content.append(held)
            for rank in range(len(self.rows)):
                for row in rows:
                    assert self.rows[rank].get(self.place(group, row)) != "busy"
                    self.rows[rank][self.place(group, row)] = "busy"
                self.todo[rank].append(("store", store.job, store, tuple(content), ""))

    def start(self, orders) -> None:
        for restore in orders.restores:
            self.awaited[restore.request_id] = len(self.rows)
            if restore.refusal:
                self.failed[restore.request_id] = restore.refusal
        for rank in range(len(self.rows)):
            for restore in orders.restores:
                self.todo[rank].append(("restore", restore.request_id, restore, ()))
            for fetch in orders.fetches:
                for row in fetch.rows:
                    assert self.rows[rank].get(self.place(fetch.group, row)) != "busy"
                    self.rows[rank][self.place(fetch.group, row)] = "busy"
                self.todo[rank].append(("fetch", fetch.job, fetch, ()))
            for seek in orders.seeks:
                self.todo[rank].append(("seek", seek.job, seek, ()))

    def work(self, everything=False) -> Results:
        reports, received = [], []
        for rank in range(len(self.rows)):
            if rank in self.silent:
                continue
            told = {"stored": {}, "kept": [], "fetched": {}, "found": {}}
            changes = []
            later = []
            todo, self.todo[rank] = self.todo[rank], []
            self.rng.shuffle(todo)
            for job in todo:
                if not everything and self.rng.random() < self.lag:
                    later.append(job)
                    continue
                getattr(self, "_" + job[0])(rank, job, told, changes, received, later)
            self.todo[rank].extend(later)
            if self.fail and self.rng.random() < 0.1:
                for tier in self.tiers:
                    kept = self.lower[rank][tier]
                    if kept:
                        gone = self.rng.choice(sorted(kept))
                        del kept[gone]
                        changes.append(TierChange(tier, gone[0], (), (gone[1],)))
            told["kept"] = tuple(told["kept"])
            reports.append(OffloadReport(rank, self.cleared, **told, changes=tuple(changes)))
        self.rng.shuffle(reports)
        failed = {name: self.failed.pop(name) for name in received if name in self.failed}
        return Results(received=tuple(received), failed=failed, offload=tuple(r for r in reports if r))

    @property
    def is_idle(self) -> bool:
        return not any(self.todo) and not self.awaited

    def _breaks(self) -> bool:
        return self.rng.random() < self.fail

    def _store(self, rank, job, told, changes, received, later) -> None:
        _, number, store, content, cleared = job
        bad, good = [], []
        for row, name, held in zip(store.copies.rows, store.hashes, content, strict=True):
            place = self.place(store.copies.group, row)
            assert self.rows[rank][place] == "busy"
            if self._breaks():
                bad.append(name)
                # Out of use until the job was kept.
                self.rows[rank][place] = "busy" if store.keep else GARBAGE
            else:
                self.rows[rank][place] = held
                good.append((name, place, held))
        told["stored"][number] = tuple(bad)
        if store.keep:
            broken = [
                self.place(store.copies.group, row)
                for row, name in zip(store.copies.rows, store.hashes, strict=True)
                if name in bad
            ]
            if cleared:
                good = []
            later.append(("keep", number, (store, broken), tuple(good)))

    def _keep(self, rank, job, told, changes, received, later) -> None:
        _, number, about, good = job
        store, broken = about
        for name, place, held in good:
            assert self.rows[rank][place] == held, "a row was reused while it was read"
            if self._breaks():
                continue
            for tier in self.tiers:
                self.lower[rank][tier][store.copies.group, name] = held
                changes.append(TierChange(tier, store.copies.group, (name,)))
        for place in broken:
            assert self.rows[rank][place] == "busy"
            self.rows[rank][place] = GARBAGE
        told["kept"].append(number)

    def _fetch(self, rank, job, told, changes, received, later) -> None:
        fetch = job[2]
        missing = []
        for row, name in zip(fetch.rows, fetch.hashes, strict=True):
            place = self.place(fetch.group, row)
            assert self.rows[rank][place] == "busy"
            held = self.lower[rank][fetch.tier].get((fetch.group, name))
            if fetch.tier == "store":
                # It keeps no index: what is seen there is announced, and what is missed taken back.
                seen = ((), (name,)) if held is None else ((name,), ())
                changes.append(TierChange(fetch.tier, fetch.group, *seen))
            if held is None or self._breaks():
                missing.append(name)
                self.rows[rank][place] = GARBAGE
            else:
                self.rows[rank][place] = held
        told["fetched"][job[1]] = tuple(missing)

    def _seek(self, rank, job, told, changes, received, later) -> None:
        seek = job[2]
        kept = self.lower[rank][seek.tier]
        told["found"][job[1]] = tuple(n for n in seek.hashes if (seek.group, n) in kept)

    def _restore(self, rank, job, told, changes, received, later) -> None:
        restore = job[2]
        for copies in restore.copies:
            for block_id, row in zip(copies.block_ids, copies.rows, strict=True):
                held = self.rows[rank][self.place(copies.group, row)]
                assert held not in ("busy", GARBAGE)
                if rank == 0:
                    self.stack.device[copies.group, block_id] = held
        if self._breaks() and restore.request_id not in self.failed:
            self.failed[restore.request_id] = "copy failed"
            for copies in restore.copies:
                for block_id in copies.block_ids:
                    self.stack.device[copies.group, block_id] = GARBAGE
        self.awaited[restore.request_id] -= 1
        if not self.awaited[restore.request_id]:
            del self.awaited[restore.request_id]
            received.append(restore.request_id)
            self.num_restored += 1
