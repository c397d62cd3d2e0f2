"""A worker's answer as tables for people, 80 columns wide. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvconnect.peer.description import Description
from kvconnect.peer.inspection import Inspection, LeaseView, LoadView, PeerView, RecordView, SlotsView
from kvconnect.tools.showing import duration, printable, size

WIDTH = 80
_MOST_ROWS = 10
_OF_SECTIONS = ("leases", "loads", "slots", "peers", "inbound_peers")


def tables(address: str, described: Description, found: Inspection) -> Iterator[Table]:
    """The worker's description, then a table for each kind of entry in its state."""
    head = (
        ("worker", f"{found.engine_id} rank {found.rank} at {address}"),
        ("role", f"{described.role}, lease {described.lease_s:g} s"),
        ("engine", described.lane),
        ("release", f"kvconnect {described.release}, protocol {described.protocol}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in described.versions.items())),
        ("ranks", ", ".join(f"{one.rank} at {one.host}:{one.port}" for one in described.directory)),
        ("besides", _besides(found)),
    )
    yield _table("", "what text", ((what, _shown(text)) for what, text in head if text))
    held = found.counts["leases"] + found.counts["streaming_prefills"]
    title, columns = _some("leases", found.leases, held), "AGE> LEFT> BLOCKS> TOKENS> STATE REQUEST"
    yield _table(title, columns, map(_lease, found.leases[:_MOST_ROWS]))
    title, columns = (
        _some("loads in flight", found.loads, found.counts["loads"]),
        "AGE> LEFT> LANDED> PHASE REQUEST",
    )
    yield _table(title, columns, map(_load, found.loads[:_MOST_ROWS]))
    yield _table("slots", "TO SIZE> FREE> OURS> GRANTED> QUARANTINED>", map(_slots, found.slots))
    title = _some("peers", found.peers, len(found.peers))
    yield _table(title, "KV_IS PEER STATE", map(_peer, found.peers[:_MOST_ROWS]))
    if ended := found.ended[:_MOST_ROWS]:
        yield _table("loads that ended", "OUTCOME", ((_shown(str(outcome)),) for outcome in ended))
    for receipt in found.receipts:
        text = json.dumps(receipt, indent=1)
        yield _table("receipt", "TEXT", ((_shown(*text.splitlines()),),))
    if found.tiers:
        yield _table(
            "tiers", "TIER CONTENTS> TAKEN> BOUND> BESIDES", itertools.starmap(_tier, found.tiers.items())
        )
    yield _table(
        "last records", "AGE> WHAT NUMBER> REQUEST_OR_DIGEST", map(_record, found.latest[:_MOST_ROWS])
    )


def _lease(one: LeaseView) -> tuple[str, ...]:
    times = _time(one.age_s), _time(one.left_s)
    return *times, str(one.blocks), str(one.tokens), _shown(one.state), _shown(one.request_id or one.digest)


def _load(one: LoadView) -> tuple[str, ...]:
    landed = f"{size(one.landed_bytes)} of {size(one.total_bytes)}" if one.total_bytes else ""
    names = _shown(one.request_id, f"from {one.engine_id or 'any engine'} at {one.address}")
    return _time(one.age_s), _time(one.left_s), landed or "-", _shown(one.phase), names


def _slots(one: SlotsView) -> tuple[str, ...]:
    numbers = one.free, one.ours, one.granted, one.quarantined
    return one.direction, size(one.slot_bytes), *map(str, numbers)


def _peer(one: PeerView) -> tuple[str, ...]:
    ranks = f" rank {', '.join(map(str, one.ranks))}" if one.ranks else ""
    lines = [one.met or "not connected"]
    if one.rate:
        lines.append(one.rate)
    if one.failures:
        retry = f", not tried for {one.retry_s:.1f} s" if one.refusal else ", being tried again"
        lines.append(f"breaker open: {one.failures} failures{retry}")
    if one.loss:
        lines.append(f"lost {duration(one.loss_age_s)} ago, {one.loss}")
    return one.direction, _shown(one.engine_id + ranks, one.address), _shown(*lines)


def _tier(name: str, state: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = (size(state[key]) if key in state else "-" for key in ("taken_bytes", "limit_bytes"))
    known = ("records", "taken_bytes", "limit_bytes")
    besides = [f"{key} {value}" for key, value in state.items() if key not in known and value]
    return _shown(name), str(state.get("records", "-")), *sizes, _shown(", ".join(besides))


def _record(one: RecordView) -> tuple[str, ...]:
    age = f"{one.age_s:.3f}s" if one.age_s < 60 else duration(one.age_s)
    return age, _shown(one.moment), str(one.number), _shown(one.request_id or one.digest)


def _besides(found: Inspection) -> str:
    counts = {name: count for name, count in found.counts.items() if count and name not in _OF_SECTIONS}
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())


def _some(what: str, rows: Sequence[object], count: int) -> str:
    shown = min(len(rows), _MOST_ROWS)
    return f"{what}: {count}" + (f", the oldest {shown} of them" if shown < count else "")


def _table(title: str, columns: str, rows: Iterable[Sequence[str]]) -> Table:
    """A table; a column whose name ends in ``>`` holds numbers, and the last column takes the spare width."""
    rows, names = list(rows), columns.split()
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, show_header=bool(title and rows)
    )
    for name in names:
        is_number = name.endswith(">")
        table.add_column(
            name.rstrip(">").replace("_", " "),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            ratio=1 if name is names[-1] and not is_number else None,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    return table


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}s" if seconds < 60 else duration(seconds)


def _shown(*lines: str) -> str:
    """Text from a worker, escaped: clients and peers may have chosen it."""
    return "\n".join(escape(printable(line)) for line in lines)
