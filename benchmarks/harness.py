"""What all benchmarks share: options as annotated fields of a dataclass, and findings as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, get_type_hints

import typer

from kvconnect.cli.options import with_options_of
from kvconnect.errors import ConfigError, KVConnectError

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Options:
    """A run of a benchmark. Raises ``ConfigError`` for an option that is not usable.

    ``SUITED`` has the values of options that were left out, on a CPU and on a GPU.
    """

    SUITED: ClassVar[Mapping[str, tuple[Any, Any]]] = {}

    def __post_init__(self) -> None:
        device = getattr(self, "device", "cpu")
        if device not in DEVICES:
            raise ConfigError(f"device is {device!r}; accepted: {', '.join(DEVICES)}")
        for name, values in self.SUITED.items():
            if not getattr(self, name):
                object.__setattr__(self, name, values[DEVICES.index(device)])
        for one in fields(self):
            given = getattr(self, one.name)
            for value in given if isinstance(given, list) else [given]:
                if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                    raise ConfigError(f"{one.name} is {value}, it must be more than 0")


def report(bench: str, finding: Any) -> None:
    """Print a finding, a dataclass or a mapping whose names have their units, as one JSON line."""
    values = finding if isinstance(finding, Mapping) else asdict(finding)
    print(json.dumps({"bench": bench, **_rounded(values)}), flush=True)


def note(text: str) -> None:
    """Print what a reader of the figures must know."""
    print(text, file=sys.stderr, flush=True)


def _rounded(value: Any) -> Any:
    """The same with five digits of every float: no clock here has more."""
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def run_app(app: typer.Typer) -> None:
    """Run the command that the process was given; an error of kvconnect is one line and exit code 2."""
    try:
        app()
    except KVConnectError as error:
        typer.echo(f"{error}", err=True)
        sys.exit(2)


def add_command(app: typer.Typer, name: str, text: str, run: Callable[[Any], int | None]) -> None:
    """Add ``bench_NAME(options)`` as a command, whose options are the fields of its ``Options``.

    It returns the exit code.
    """

    @with_options_of(get_type_hints(run)["options"])
    def command(options: Any) -> None:
        raise typer.Exit(run(options) or 0)

    app.command(name, help=text)(command)
