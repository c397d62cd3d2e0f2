"""``kvconnect inspect``: text that fits 80 columns and steers no terminal, JSON, and an end by Ctrl-C."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from kvconnect.addresses import RankAddress
from kvconnect.node.children import COMMAND
from kvconnect.peer.description import Description
from kvconnect.peer.inspection import Inspection
from kvconnect.tools.inspect_runner import as_json
from kvconnect.tools.showing import WIDTH
from kvconnect.tools.worker_text import text_of
from tests.ports import free_port

DESCRIBED = Description(
    clock_s=1.0,
    role="kv_consumer",
    lane="UCX NET_DEVICES=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_4:1,mlx5_5:1",
    lease_s=30.0,
    versions={"python": "3.12.1", "torch": "2.13.0+cu130", "nixl": "1.5.1", "vllm": "0.33.0"},
    directory=(RankAddress(0, "10.0.0.1", 14600), RankAddress(1, "10.0.0.1", 14601)),
    introduced=msgspec.Raw(b"\xc0"),
)
LONG = "cmpl-" + "\x1b[2J[red]" * 16 + "0"
COUNTS = {"leases": 400, "expected": 5, "streaming_prefills": 3, "loads": 1, "pending_fetches": 2}


def lease(number):
    row = {"digest": f"d{number}", "request_id": LONG + str(number), "state": "held", "tokens": 1 << 20}
    return row | {"blocks": 65536, "renewed_by": 1, "age_s": 5000.0 - number, "left_s": 12.5}


LOAD = {"digest": "d", "request_id": LONG, "engine_id": "prefill", "address": "10.0.0.2:14600"}
LOAD |= {"phase": "failed: peer has other weights", "age_s": 3.0, "left_s": 57.0}
LOAD |= {"landed_bytes": 3 << 28, "total_bytes": 3 << 30}
LOST = {"direction": "received", "engine_id": "prefill", "ranks": [], "address": "10.0.0.2:14600", "met": ""}
LOST |= {"failures": 3, "refusal": "the peer is out of reach, it was tried just now: silence", "retry_s": 1.5}
LOST |= {"loss": "silent: the peer has been silent for 10.0 s", "loss_age_s": 4.0}
MET = {"direction": "sent", "engine_id": LONG, "ranks": [3], "address": "h", "met": "it connected"}
SLOTS = {"slot_bytes": 4 << 20, "free": 8, "ours": 0, "granted": 0, "quarantined": 0}
FOUND = Inspection(
    engine_id="decode",
    rank=0,
    counts=COUNTS,
    leases=tuple(lease(number) for number in range(60)),
    loads=(LOAD,),
    slots=({"direction": "receive", **SLOTS, "granted": 2}, {"direction": "send", **SLOTS}),
    peers=(LOST, {**MET, "rate": "tcp (observed), 5.0 GB/s"}),
    tiers={"host": {"records": 12, "taken_bytes": 1 << 30, "limit_bytes": 1 << 31}, "store": {"link": "up"}},
    latest=({"age_s": 0.5, "moment": "late", "digest": "", "request_id": "", "number": 1884},),
    is_last=True,
)


def printed(found=FOUND):
    return "\n".join(text_of("10.0.0.1:14600", DESCRIBED, found))


def test_text_fits_80_columns_and_steers_no_terminal():
    text = printed()
    assert max(map(len, text.splitlines())) <= WIDTH == 80
    assert "\x1b" not in text
    assert len(text.splitlines()) < 110


def test_what_there_is_none_of_has_a_line():
    text = printed(msgspec.structs.replace(FOUND, loads=(), counts={**COUNTS, "loads": 0}))
    assert "loads in flight: 0\n\nslots" in text


SHOWN = (
    "kv_consumer, lease 30 s",
    "1 at 10.0.0.1:14601",
    "pending fetches 2",
    "leases: 403, the first 10 of them",
    "phase failed: peer has other weights, age 3s, left 57s, landed 768 MiB, total 3 GiB",
    "state held, tokens 1048576, blocks 65536, renewed by 1, age 1h, left 12.5s",
    "from prefill at 10.0.0.2:14600",
    "send: slot 4 MiB, free 8, ours 0, granted 0, quarantined 0",
    "KV received: prefill at 10.0.0.2:14600, not connected: failures 3, refusal the peer is out of reach",
    "retry 1.5s, loss silent: the peer has been silent for 10.0 s, loss age 4s",
    "at h, it connected: ranks 3, rate tcp (observed), 5.0 GB/s",
    "host: records 12, taken 1 GiB, limit 2 GiB",
    "store: link up",
    "age 0.5s, moment late, number 1884",
)


def test_what_a_person_looks_for_is_there():
    text = " ".join(printed().split())
    assert not [shown for shown in SHOWN if shown not in text], text


def test_json_has_everything_and_no_introduction():
    made = json.loads(as_json("10.0.0.1:14600", DESCRIBED, FOUND))
    assert made["worker"]["role"] == "kv_consumer"
    assert made["worker"]["address"] == "10.0.0.1:14600"
    assert "introduced" not in made["worker"]
    assert len(made["holds"]["leases"]) == 60
    assert made["holds"]["counts"] == COUNTS


ODD = (None, [], {}, "x", [{}], 7, msgspec.msgpack.Ext(1, b""), {(1, 2): b"\xff"})


@pytest.mark.parametrize("kind", ["leases", "loads", "slots", "peers", "latest", "receipts"])
def test_rows_of_another_release_are_shown_whatever_they_lack_or_have(kind):
    whole = next(iter(getattr(FOUND, kind)), {"tokens": 3})
    rows = [{}, *({key: value for key, value in whole.items() if key != name} for name in whole)]
    rows += [{**whole, name: odd} for name in (*whole, "more", "more_s", "more_bytes") for odd in ODD]
    found = msgspec.structs.replace(FOUND, **{kind: tuple(rows)}, counts={})
    for row in rows:
        assert printed(msgspec.structs.replace(found, **{kind: (row,)}))
    assert json.loads(as_json("h:1", DESCRIBED, found))


def test_an_address_that_is_none_and_one_without_a_worker_are_named():
    for address, reason in (("here", "HOST:PORT"), (f"127.0.0.1:{free_port()}", "nothing listens")):
        command = [*COMMAND, "inspect", address, "--insecure"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_inspect_does_not_import_torch():
    """A pod's readiness probe runs it: torch is two seconds of processor time and 190 MB each time."""
    script = "import sys, kvconnect.tools.inspect_runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
