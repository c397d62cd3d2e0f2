"""``kvconnect trace``: asks workers for their timelines, writes a trace file and prints the slowest loads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from kvconnect.addresses import read_address
from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError
from kvconnect.peer.asking import ask, describe
from kvconnect.peer.description import read_answer
from kvconnect.peer.keyring import Keyring, load_keyring
from kvconnect.peer.timeline_page import TOPIC, TimelinePage
from kvconnect.timeline import Record
from kvconnect.trace.joining import TraceSpan, Worker, align, join
from kvconnect.trace.output import slowest, trace

_MOST_PAGES = 64
_SHOWN = 10


def run_trace(addresses: Sequence[str], *, last: int, out: Path, extra: ExtraConfig) -> int:
    """Write the trace of the last so many requests of these nodes, all ranks of them. 1: there were none.

    Raises:
        ConfigError: an address or a key cannot be used, or the file cannot be written.
        PeerError: a worker does not answer.
    """
    keyring = load_keyring(extra, os.environ)
    workers = align(read_workers(extra, keyring, addresses))
    requests = join(workers)[-last:]
    try:
        out.write_text(json.dumps(trace(workers, requests)))
    except OSError as error:
        raise ConfigError(f"--out is {str(out)!r}: {error}") from error
    for line in slowest(workers, requests, _SHOWN):
        print(line)
    print(f"{len(requests)} requests are in {out}: open it with https://ui.perfetto.dev")
    return 0 if requests else 1


def read_workers(extra: ExtraConfig, keyring: Keyring | None, addresses: Sequence[str]) -> list[Worker]:
    """These workers and the other ranks of their nodes, each once. Raises as ``run_trace`` does."""
    found: dict[str, Worker] = {}
    for address in addresses:
        split = read_address(address, "the address")
        worker = read_worker(extra, keyring, split)
        found[worker.name] = worker
        for other in describe(extra, keyring, split).description.directory:
            if other.rank != worker.rank:
                rank = read_worker(extra, keyring, (other.host, other.port))
                found.setdefault(rank.name, rank)
    return list(found.values())


def read_worker(extra: ExtraConfig, keyring: Keyring | None, address: tuple[str, int]) -> Worker:
    """All that a worker has recorded. Raises ``PeerError``: it does not answer."""
    records: list[Record] = []
    ahead, argument = TraceSpan(), ""
    # A worker that is busy records more meanwhile, and there is an end all the same.
    for _ in range(_MOST_PAGES):
        reply = ask(extra, keyring, address, TOPIC, argument)
        page = read_answer(reply.data, TimelinePage)
        records += page.records()
        ahead = TraceSpan(page.clock_s - reply.answered_at, page.clock_s - reply.asked_at).also(ahead)
        if page.is_last or not records:
            break
        argument = repr(records[-1][0])
    return Worker(f"{page.engine_id} rank {page.rank}", page.rank, records, ahead, page.clock_s)
