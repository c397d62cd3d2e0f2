"""What the parts of the demo share: names that are asked for, processes, and a report of what was found."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from kvconnect.demo.children import Children
from kvconnect.errors import ConfigError, KVConnectError


@dataclass(kw_only=True)
class Finding:
    """One line of a report. ``problems`` is empty exactly if everything was as it must be."""

    model: str
    token_exact: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What ran."""
        return self.model

    def summary(self) -> str:
        """What was found, in words."""
        raise NotImplementedError


def known(what: str, names: Sequence[str], accepted: Sequence[str]) -> list[str]:
    """These names, each once; none means all. Raises ConfigError: one is not accepted."""
    for name in names:
        if name not in accepted:
            raise ConfigError(f"{what} {name!r} is unknown; choose from {', '.join(accepted)}")
    return list(dict.fromkeys(names)) or list(accepted)


def report(run: Callable[[Path], Iterator[Finding]], *, json_output: bool) -> int:
    """Print what ``run`` finds with a folder for its logs. Returns the exit code: 1 if anything was wrong.

    Outcomes go to stdout, everything else to stderr.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvconnect-demo-"))
    failed = False
    before = signal.signal(signal.SIGTERM, _raise_exit)
    try:
        for finding in run(folder):
            failed = failed or bool(finding.problems)
            verdict = "FAILED" if finding.problems else "ok"
            line = f"{verdict:6} {finding.name:15} {finding.summary()}, {finding.seconds:.1f} s"
            print(line, file=sys.stderr if json_output else sys.stdout, flush=True)
            for problem in finding.problems:
                note(f"{finding.name}: {problem}")
            if json_output:
                print(json.dumps(asdict(finding)), flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        if failed:
            note(f"logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


@contextlib.contextmanager
def judging(finding: Finding, folder: Path) -> Iterator[Children]:
    """The processes behind a finding. A failure is one of its problems, and their logs are shown then."""
    started = time.monotonic()
    note(f"{'...':6} {finding.name:15} its processes start, which takes some seconds")
    with Children(folder) as children:
        try:
            yield children
        except KVConnectError as error:
            finding.problems.append(str(error))
        finding.seconds = round(time.monotonic() - started, 2)
        if finding.problems:
            note(children.tails())


def note(text: str) -> None:
    """Print a line that is no outcome."""
    print(text, file=sys.stderr, flush=True)


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that every ``with`` block ends its children."""
    raise SystemExit(128 + number)
