"""A worker's answer as text for people, 80 columns wide. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvconnect.peer.description import Description
from kvconnect.peer.inspection import Inspection, Row
from kvconnect.tools.showing import duration, paragraph, size

_MOST_ROWS = 10
_IN_NAMES = {"digest", "request_id", "direction", "engine_id", "address", "met"}
_SHOWN = ("leases", "expected", "streaming_prefills", "loads", "slots", "peers", "inbound_peers")


def text_of(address: str, described: Description, found: Inspection) -> Iterator[str]:
    """The worker's description, then a section for each kind of entry in its state."""
    counts = found.counts
    head = {
        "worker": f"{found.engine_id} rank {found.rank} at {address}",
        "role": f"{described.role}, lease {described.lease_s:g} s",
        "engine": described.lane,
        "release": f"kvconnect {described.release}, protocol {described.protocol}",
        "versions": ", ".join(f"{name} {version}" for name, version in described.versions.items()),
        "ranks": ", ".join(f"{one.rank} at {one.host}:{one.port}" for one in described.directory),
        "besides": _fields({what: count or None for what, count in counts.items() if what not in _SHOWN}),
    }
    yield from (paragraph(f"{what:<9}", text, 9) for what, text in head.items() if text)
    leases = ((_request(one), one) for one in found.leases)
    # Of the prefills that former releases expect, those without progress are no rows.
    prefills = counts.get("streaming_prefills", 0)
    yield from _section("leases", leases, counts.get("leases", 0) + prefills)
    loads = (
        (f"{_request(one)} from {_text(one, 'engine_id') or 'any engine'} at {_text(one, 'address')}", one)
        for one in found.loads
    )
    yield from _section("loads in flight", loads, counts.get("loads", 0))
    yield from _section("slots", ((_text(one, "direction"), one) for one in found.slots))
    peers = (
        (
            f"KV {_text(one, 'direction')}: {_text(one, 'engine_id')} at {_text(one, 'address')}, "
            f"{_text(one, 'met') or 'not connected'}",
            one,
        )
        for one in found.peers
    )
    yield from _section("peers", peers)
    yield from _section("loads that ended", ((str(outcome), {}) for outcome in found.ended))
    for receipt in found.receipts:
        yield "\nreceipt"
        # Values of another release that JSON cannot represent are shown as text.
        text = msgspec.json.format(msgspec.json.encode(receipt, enc_hook=str), indent=1).decode()
        yield from (paragraph("  ", line, 4) for line in text.splitlines())
    yield from _section("tiers", found.tiers.items())
    yield from _section("last records", ((_request(one), one) for one in found.latest))


def _text(row: Row, name: str) -> str:
    """A field that other releases may not have."""
    return str(row.get(name) or "")


def _request(row: Row) -> str:
    return _text(row, "request_id") or _text(row, "digest")


def _section(title: str, entries: Iterable[tuple[str, Row]], count: int = 0) -> Iterator[str]:
    """The first of these entries, each with its fields; ``count``: so many there are, if not all are here."""
    rows = list(entries)
    count, shown = max(count, len(rows)), rows[:_MOST_ROWS]
    yield f"\n{title}: {count}" + (f", the first {len(shown)} of them" if len(shown) < count else "")
    for name, one in shown:
        fields = _fields(one)
        yield paragraph("  ", f"{name}: {fields}" if fields else name, 4)


def _fields(one: Row) -> str:
    """A row's fields besides its name, as ``state held, left 12.5s``, without empty ones."""
    texts = []
    for name, value in one.items():
        # A count of 0 is information: no slot is free, a load failed.
        if name in _IN_NAMES or value is False or value in (None, "", []):
            continue
        if isinstance(value, list):
            value = " ".join(map(str, value))
        elif not isinstance(value, int | float):
            value = str(value)
        elif name.endswith("_s"):
            value = f"{round(value, 3):.3g}s" if value < 60 else duration(value)
        elif name.endswith("_bytes"):
            value = size(value)
        # The unit comes last in a field's name.
        texts.append(f"{name.removesuffix('_s').removesuffix('_bytes').replace('_', ' ')} {value}")
    return ", ".join(texts)
