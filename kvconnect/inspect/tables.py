"""What a worker answered, as tables for people, 80 columns wide. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape
from rich.table import Table

from kvconnect.peer.description import Description
from kvconnect.peer.inspection import Inspection, LeaseView, LoadView, PeerView
from kvconnect.showing import duration, printable, size

WIDTH = 80
_MOST_ROWS = 10
_OF_SECTIONS = ("leases", "loads", "slots", "peers", "inbound_peers")


def tables(address: str, described: Description, found: Inspection) -> Iterator[Table]:
    """Who the worker is, then a section for each kind of what it holds."""
    for table in _tables(address, described, found):
        table.show_header = table.show_header and table.row_count > 0
        yield table


def _tables(address: str, described: Description, found: Inspection) -> Iterator[Table]:
    head = _table("", "what", "text")
    for what, text in (
        ("worker", f"{found.engine_id} rank {found.rank} at {address}"),
        ("role", f"{described.role}, path {described.path}, lease {described.lease_s:g} s"),
        ("engine", described.lane),
        ("release", f"kvconnect {described.release}, protocol {described.protocol}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in described.versions.items())),
        ("ranks", ", ".join(f"{one.rank} at {one.host}:{one.port}" for one in described.directory)),
        ("besides", _besides(found)),
    ):
        if text:
            head.add_row(what, _shown(text))
    yield head
    yield _leases(found.leases, found.counts["leases"] + found.counts["streaming_prefills"])
    yield _loads(found.loads, found.counts["loads"])
    yield _slots(found)
    yield _peers(found.peers)
    if found.tiers:
        yield _tiers(found)
    latest = _table("last records", "AGE>", "WHAT", "NUMBER>", "REQUEST OR DIGEST")
    for one in found.latest[:_MOST_ROWS]:
        age = f"{one.age_s:.3f}s" if one.age_s < 60 else duration(one.age_s)
        latest.add_row(age, _shown(one.moment), str(one.number), _shown(one.request_id or one.digest))
    yield latest


def _leases(leases: Sequence[LeaseView], count: int) -> Table:
    table = _table(_some("leases", leases, count), "AGE>", "LEFT>", "BLOCKS>", "TOKENS>", "STATE", "REQUEST")
    for one in leases[:_MOST_ROWS]:
        numbers = _time(one.age_s), _time(one.left_s), str(one.blocks), str(one.tokens)
        table.add_row(*numbers, _shown(one.state), _shown(one.request_id or one.digest))
    return table


def _loads(loads: Sequence[LoadView], count: int) -> Table:
    table = _table(_some("loads in flight", loads, count), "AGE>", "LEFT>", "LANDED>", "PHASE", "REQUEST")
    for one in loads[:_MOST_ROWS]:
        landed = f"{size(one.landed_bytes)} of {size(one.total_bytes)}" if one.total_bytes else one.path
        names = _shown(one.request_id, f"from {one.engine_id or 'any engine'} at {one.address}")
        table.add_row(_time(one.age_s), _time(one.left_s), landed or "-", _shown(one.phase), names)
    return table


def _slots(found: Inspection) -> Table:
    table = _table("slots", "TO", "SIZE>", "FREE>", "OURS>", "GRANTED>", "QUARANTINED>")
    for one in found.slots:
        numbers = one.free, one.ours, one.granted, one.quarantined
        table.add_row(one.direction, size(one.slot_bytes), *map(str, numbers))
    return table


def _peers(peers: Sequence[PeerView]) -> Table:
    table = _table(_some("peers", peers, len(peers)), "KV IS", "PEER", "STATE")
    for one in peers[:_MOST_ROWS]:
        ranks = f" rank {', '.join(map(str, one.ranks))}" if one.ranks else ""
        lines = [f"{one.met}; path {one.path}" if one.met else "not connected"]
        if one.rate:
            lines.append(one.rate)
        if one.failures:
            retry = f", not tried for {one.retry_s:.1f} s" if one.refusal else ", being tried again"
            lines.append(f"breaker open: {one.failures} failures{retry}")
        if one.loss:
            lines.append(f"lost {duration(one.loss_age_s)} ago, {one.loss}")
        table.add_row(one.direction, _shown(one.engine_id + ranks, one.address), _shown(*lines))
    return table


def _tiers(found: Inspection) -> Table:
    table = _table("tiers", "TIER", "CONTENTS>", "TAKEN>", "BOUND>", "BESIDES")
    for name, state in found.tiers.items():
        sizes = (size(state[key]) if key in state else "-" for key in ("taken_bytes", "limit_bytes"))
        known = ("records", "taken_bytes", "limit_bytes")
        besides = [f"{key} {value}" for key, value in state.items() if key not in known and value]
        table.add_row(_shown(name), str(state.get("records", "-")), *sizes, _shown(", ".join(besides)))
    return table


def _besides(found: Inspection) -> str:
    counts = {name: count for name, count in found.counts.items() if count and name not in _OF_SECTIONS}
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())


def _some(what: str, rows: Sequence[object], count: int) -> str:
    shown = min(len(rows), _MOST_ROWS)
    return f"{what}: {count}" + (f", the oldest {shown} of them" if shown < count else "")


def _table(title: str, *columns: str) -> Table:
    """A table of this title; a column whose name ends in ``>`` is of numbers, the last one takes the rest."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=bool(title))
    for column in columns:
        is_last, is_number = column is columns[-1], column.endswith(">")
        table.add_column(
            column.rstrip(">"),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            ratio=1 if is_last and not is_number else None,
            overflow="fold",
        )
    return table


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}s" if seconds < 60 else duration(seconds)


def _shown(*lines: str) -> str:
    """Texts of a worker, whose clients and peers may have chosen them."""
    return "\n".join(escape(printable(line)) for line in lines)
