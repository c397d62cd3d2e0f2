"""``kvconnect inspect``: asks a worker what it holds, and shows it once or each second."""

from __future__ import annotations

import contextlib
import os
import time

import msgspec
from rich.console import Console, Group

from kvconnect.addresses import read_address
from kvconnect.config import ExtraConfig
from kvconnect.errors import PeerError
from kvconnect.inspect.tables import WIDTH, tables
from kvconnect.peer.asking import ask, describe
from kvconnect.peer.description import Description, read_answer
from kvconnect.peer.inspection import OF_REQUEST, TOPIC, Inspection
from kvconnect.peer.keyring import Keyring, load_keyring
from kvconnect.showing import printable

_EACH_S = 1.0
_MOST_PAGES = 256


def run_inspect(
    address: str, extra: ExtraConfig, *, request: str = "", watch: bool, json_output: bool
) -> int:
    """Print what a worker holds, or only what belongs to one ``request``.

    With ``watch`` each second, or why it does not answer then, until Ctrl-C.

    Raises:
        ConfigError: the address or a key cannot be used.
        PeerError: it does not answer.
    """
    split = read_address(address, "the address")
    keyring, console = load_keyring(extra, os.environ), Console(width=WIDTH, highlight=False)

    def show() -> None:
        described, found = look(extra, keyring, split, request=request, whole=json_output)
        if json_output:
            print(as_json(address, described, found), flush=True)
            return
        shown = Group(*tables(address, described, found))
        if watch:
            console.clear()
        console.print(shown)

    with contextlib.suppress(KeyboardInterrupt):
        show()
        while watch:
            time.sleep(_EACH_S)
            try:
                show()
            except PeerError as error:
                # A worker that is watched may stop, and come back.
                if json_output:
                    print(msgspec.json.encode({"error": str(error)}).decode(), flush=True)
                else:
                    console.print(printable(str(error)), markup=False)
    return 0


def look(
    extra: ExtraConfig, keyring: Keyring | None, address: tuple[str, int], *, request: str = "", whole: bool
) -> tuple[Description, Inspection]:
    """What a worker is, and what it holds; ``whole``: with all leases and loads, not only the oldest.

    Raises ``PeerError``.
    """
    described = describe(extra, keyring, address).description
    pages: list[Inspection] = []
    while not pages or (whole and not pages[-1].is_last and len(pages) < _MOST_PAGES):
        seen = sum(max(len(page.leases), len(page.loads)) for page in pages)
        about = f"{OF_REQUEST}{request}" if request else str(seen)
        pages.append(read_answer(ask(extra, keyring, address, TOPIC, about).data, Inspection))
    # What lies at the end of a page may move to the next one while the two are read.
    leases = {(one.digest, one.request_id): one for page in pages for one in page.leases}
    loads = {one.request_id: one for page in pages for one in page.loads}
    return described, msgspec.structs.replace(
        pages[-1], leases=tuple(leases.values()), loads=tuple(loads.values())
    )


def as_json(address: str, described: Description, found: Inspection) -> str:
    """One object on one line: what it is as ``worker``, and what it ``holds``."""
    worker = {**msgspec.structs.asdict(described), "address": address}
    # By what two caches match is what `doctor` and `explain` show.
    del worker["introduced"]
    return msgspec.json.encode({"worker": worker, "holds": found}).decode()
