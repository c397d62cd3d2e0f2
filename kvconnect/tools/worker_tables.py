"""A worker's answer as tables for people, 80 columns wide. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from kvconnect.peer.description import Description
from kvconnect.peer.inspection import Inspection
from kvconnect.tools.showing import duration, printable, size

WIDTH = 80
_MOST_ROWS = 10
_IN_NAMES = {"digest", "request_id", "direction", "engine_id", "address", "met"}
_OF_SECTIONS = ("leases", "loads", "slots", "peers", "inbound_peers")


def tables(address: str, described: Description, found: Inspection) -> Iterator[Table]:
    """The worker's description, then a table for each kind of entry in its state."""
    besides = found.counts.items()
    head = (
        ("worker", f"{found.engine_id} rank {found.rank} at {address}"),
        ("role", f"{described.role}, lease {described.lease_s:g} s"),
        ("engine", described.lane),
        ("release", f"kvconnect {described.release}, protocol {described.protocol}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in described.versions.items())),
        ("ranks", ", ".join(f"{one.rank} at {one.host}:{one.port}" for one in described.directory)),
        ("besides", _text({what: count for what, count in besides if count and what not in _OF_SECTIONS})),
    )
    yield _table("", "what text", ((what, _shown(text)) for what, text in head if text))
    held = found.counts["leases"] + found.counts["streaming_prefills"]
    leases = ((one.request_id or one.digest, one) for one in found.leases)
    yield _entries(_some("leases", found.leases, held), "REQUEST LEASE", leases)
    loads = (
        (f"{one.request_id} from {one.engine_id or 'any engine'} at {one.address}", one)
        for one in found.loads
    )
    title = _some("loads in flight", found.loads, found.counts["loads"])
    yield _entries(title, "REQUEST LOAD", loads)
    yield _entries("slots", "TO SLOTS", ((one.direction, one) for one in found.slots))
    peers = (
        (f"KV {one.direction}: {one.engine_id} at {one.address}, {one.met or 'not connected'}", one)
        for one in found.peers
    )
    yield _entries(_some("peers", found.peers, len(found.peers)), "PEER STATE", peers)
    if ended := found.ended[:_MOST_ROWS]:
        yield _table("loads that ended", "OUTCOME", ((_shown(str(outcome)),) for outcome in ended))
    for receipt in found.receipts:
        text = json.dumps(receipt, indent=1)
        yield _table("receipt", "TEXT", ((_shown(*text.splitlines()),),))
    if found.tiers:
        yield _entries("tiers", "TIER STATE", found.tiers.items())
    records = ((one.request_id or one.digest, one) for one in found.latest)
    yield _entries("last records", "REQUEST RECORD", records)


def _entries(title: str, columns: str, entries: Iterable[tuple[str, Any]]) -> Table:
    shown = itertools.islice(entries, _MOST_ROWS)
    return _table(title, columns, ((_shown(name), _shown(_text(one))) for name, one in shown))


def _text(one: msgspec.Struct | Mapping[str, Any]) -> str:
    """An entry's fields besides its name, as ``state held, left 12.5s``, without empty and default ones."""
    if isinstance(one, msgspec.Struct):
        fields = msgspec.structs.fields(one)
        one = {field.name: value for field in fields if (value := getattr(one, field.name)) != field.default}
    texts = []
    for name, value in one.items():
        # A count of 0 is information: no slot is free, a load failed.
        if name in _IN_NAMES or value is False or value in (None, "", ()):
            continue
        if isinstance(value, tuple):
            value = " ".join(map(str, value))
        elif name.endswith("_s"):
            value = _time(value)
        elif name.endswith("_bytes"):
            value = size(value)
        # The unit comes last in a field's name.
        texts.append(f"{name.removesuffix('_s').removesuffix('_bytes').replace('_', ' ')} {value}")
    return ", ".join(texts)


def _some(what: str, rows: Sequence[object], count: int) -> str:
    shown = min(len(rows), _MOST_ROWS)
    return f"{what}: {count}" + (f", the oldest {shown} of them" if shown < count else "")


def _table(title: str, columns: str, rows: Iterable[Sequence[str]]) -> Table:
    rows = list(rows)
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, show_header=bool(title and rows)
    )
    for name in columns.split():
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _time(seconds: float) -> str:
    return f"{round(seconds, 3):.3g}s" if seconds < 60 else duration(seconds)


def _shown(*lines: str) -> str:
    """Text from a worker, escaped: clients and peers may have chosen it."""
    return "\n".join(escape(printable(line)) for line in lines)
