"""``kvconnect inspect``: asks workers for their state or timelines: text, JSON, or a trace file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvconnect.addresses import join_address
from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError, PeerError
from kvconnect.peer.asking import ask, describe
from kvconnect.peer.description import Description
from kvconnect.peer.inspection import OF_REQUEST, TOPIC, Inspection
from kvconnect.peer.keyring import Keyring, load_keyring
from kvconnect.peer.timeline_page import TOPIC as TIMELINE
from kvconnect.peer.timeline_page import TimelinePage
from kvconnect.timeline import Record
from kvconnect.tools.server_client import side_channels
from kvconnect.tools.showing import paragraph, printable
from kvconnect.tools.timelines import Worker, align, join, slowest, trace
from kvconnect.tools.worker_text import text_of

_EACH_S = 1.0
_MOST_PAGES = 256
_MOST_TIMELINE_PAGES = 64
_SHOWN = 10
_CLEARED = "\x1b[H\x1b[2J"

Address = tuple[str, int]


def run_inspect(
    given: Sequence[str], extra: ExtraConfig, *, request: str = "", watch: bool, json_output: bool
) -> int:
    """Print the state of workers, or only the part of one ``request``.

    With ``watch`` it repeats each second until Ctrl-C, and prints why a worker does not answer.

    Raises:
        ConfigError: an address or a key cannot be used.
        PeerError: a worker does not answer.
    """
    workers, keyring = _workers_at(given), load_keyring(extra, os.environ)

    def show() -> None:
        shown: list[str] = []
        for worker in workers:
            at = join_address(*worker)
            described, found = look(extra, keyring, worker, request=request, whole=json_output)
            if json_output:
                # At once: the next worker may not answer.
                print(as_json(at, described, found), flush=True)
                continue
            if request and not (found.leases or found.loads or found.ended or found.receipts):
                nothing = f"holds nothing of {request}: its decode server knows what came of it"
                shown.append(paragraph("", f"{at} {nothing}", 0))
            shown += [*text_of(at, described, found), ""]
        if json_output:
            return
        if watch and sys.stdout.isatty():
            shown.insert(0, _CLEARED)
        print("\n".join(shown), flush=True)

    with contextlib.suppress(KeyboardInterrupt):
        show()
        while watch:
            time.sleep(_EACH_S)
            try:
                show()
            except PeerError as error:
                # A watched worker may stop and come back.
                failed = msgspec.json.encode({"error": str(error)}).decode()
                print(failed if json_output else printable(str(error)), flush=True)
    return 0


def _workers_at(given: Sequence[str]) -> list[Address]:
    return [address for one in given for address in side_channels(one, "the address")]


def look(
    extra: ExtraConfig, keyring: Keyring | None, address: Address, *, request: str = "", whole: bool
) -> tuple[Description, Inspection]:
    """A worker's description and state; with ``whole`` all leases and loads, otherwise only the oldest.

    Raises ``PeerError``.
    """
    described = describe(extra, keyring, address).value
    pages: list[Inspection] = []
    while not pages or (whole and not pages[-1].is_last and len(pages) < _MOST_PAGES):
        seen = sum(max(len(page.leases), len(page.loads)) for page in pages)
        about = f"{OF_REQUEST}{request}" if request else str(seen)
        pages.append(ask(extra, keyring, address, TOPIC, Inspection, about).value)
    # An entry at the end of a page may move to the next page between two reads.
    leases = {
        (str(one.get("digest")), str(one.get("request_id"))): one for page in pages for one in page.leases
    }
    loads = {str(one.get("request_id")): one for page in pages for one in page.loads}
    return described, msgspec.structs.replace(
        pages[-1], leases=tuple(leases.values()), loads=tuple(loads.values())
    )


def as_json(address: str, described: Description, found: Inspection) -> str:
    """One JSON object on one line: the description as ``worker``, and the state as ``holds``."""
    worker = {**msgspec.structs.asdict(described), "address": address}
    # `doctor` shows whether two caches match.
    del worker["introduced"]
    # Values of another release that JSON cannot represent are shown as text.
    return msgspec.json.encode({"worker": worker, "holds": found}, enc_hook=str).decode()


def run_trace(given: Sequence[str], extra: ExtraConfig, *, last: int, out: Path) -> int:
    """Write a trace of the ``last`` requests of these nodes, with all ranks. Returns 1 without requests.

    Raises as ``run_inspect``, and ``ConfigError`` if the file cannot be written.
    """
    keyring = load_keyring(extra, os.environ)
    workers = align(read_workers(extra, keyring, given))
    requests = join(workers)[-last:]
    try:
        out.write_text(json.dumps(trace(workers, requests)))
    except OSError as error:
        raise ConfigError(f"--trace is {str(out)!r}: {error}") from error
    for line in slowest(workers, requests, _SHOWN):
        print(line)
    print(f"{len(requests)} requests are in {out}: open it with https://ui.perfetto.dev")
    return 0 if requests else 1


def read_workers(extra: ExtraConfig, keyring: Keyring | None, given: Sequence[str]) -> list[Worker]:
    """These workers and the other ranks of their nodes, each once. Raises as ``run_inspect``."""
    found: dict[str, Worker] = {}
    for address in _workers_at(given):
        worker = read_worker(extra, keyring, address)
        found[worker.name] = worker
        for other in describe(extra, keyring, address).value.directory:
            if other.rank != worker.rank:
                rank = read_worker(extra, keyring, (other.host, other.port))
                found.setdefault(rank.name, rank)
    return list(found.values())


def read_worker(extra: ExtraConfig, keyring: Keyring | None, address: Address) -> Worker:
    """All records of a worker. Raises ``PeerError`` if it does not answer."""
    records: list[Record] = []
    low, high, argument = -math.inf, math.inf, ""
    # Bounded: a busy worker records more while it is read.
    for _ in range(_MOST_TIMELINE_PAGES):
        reply = ask(extra, keyring, address, TIMELINE, TimelinePage, argument)
        page = reply.value
        records += page.records
        low, high = max(low, page.clock_s - reply.answered_at), min(high, page.clock_s - reply.asked_at)
        if page.is_last or not records:
            break
        argument = repr(records[-1][0])
    return Worker(f"{page.engine_id} rank {page.rank}", page.rank, records, (low, high), page.clock_s)
