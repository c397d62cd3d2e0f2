"""The demo's report of what was found, and the processes behind it."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from kvconnect.demo.children import Children
from kvconnect.demo.pair_outcome import PairOutcome
from kvconnect.errors import KVConnectError


def report(run: Callable[[Path], Iterator[PairOutcome]], *, json_output: bool) -> int:
    """Print what ``run`` finds with a folder for its logs. Returns the exit code: 1 if anything was wrong.

    Outcomes go to stdout, everything else to stderr.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvconnect-demo-"))
    failed = False
    before = signal.signal(signal.SIGTERM, _raise_exit)
    try:
        for outcome in run(folder):
            failed = failed or bool(outcome.problems)
            verdict = "FAILED" if outcome.problems else "ok"
            line = f"{verdict:6} {outcome.name:15} {outcome.summary()}, {outcome.seconds:.1f} s"
            print(line, file=sys.stderr if json_output else sys.stdout, flush=True)
            for problem in outcome.problems:
                note(f"{outcome.name}: {problem}")
            if json_output:
                print(json.dumps(asdict(outcome)), flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        if failed:
            note(f"logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


@contextlib.contextmanager
def judging(outcome: PairOutcome, folder: Path) -> Iterator[Children]:
    """The processes behind an outcome. A failure is one of its problems, and their logs are shown then."""
    started = time.monotonic()
    note(f"{'...':6} {outcome.name:15} its processes start, which takes some seconds")
    with Children(folder) as children:
        try:
            yield children
        except KVConnectError as error:
            outcome.problems.append(str(error))
        outcome.seconds = round(time.monotonic() - started, 2)
        if outcome.problems:
            note(children.tails())


def note(text: str) -> None:
    """Print a line that is no outcome."""
    print(text, file=sys.stderr, flush=True)


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that every ``with`` block ends its children."""
    raise SystemExit(128 + number)
