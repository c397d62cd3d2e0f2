"""Options of a benchmark as fields of a dataclass, and the command that is made of these."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from benchmarks.report import Report
from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.node.pair_demo import PROTOCOLS

DEVICES = ("cpu", "cuda")

Benchmark = Callable[[Any, Report], int | None]
"""``bench_NAME(options, report)``; it returns the exit code."""


def option(
    default: Any,
    text: str,
    *,
    flag: str = "",
    least: float | None = None,
    above: float | None = None,
    accepted: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A field of ``Options``. Its default is accepted, whatever ``least``, ``above`` and ``accepted`` say."""
    rule = {"text": text, "flag": flag, "least": least, "above": above, "accepted": accepted, "parse": parse}
    return field(default=default, metadata=rule)


@dataclass(frozen=True)
class Options:
    """A run of a benchmark.

    Raises:
        ConfigError: an option is not usable; the text names it, its value and what is accepted.
    """

    def __post_init__(self) -> None:
        for one in fields(self):
            given, rule = getattr(self, one.name), one.metadata
            if given == one.default:
                continue
            name = rule["flag"].replace("-", "_") or one.name
            for value in given if isinstance(given, tuple) else (given,):
                if rule["accepted"] and value not in rule["accepted"]:
                    raise ConfigError(f"{name} is {value!r}; accepted: {', '.join(rule['accepted'])}")
                if rule["least"] is not None and value < rule["least"]:
                    raise ConfigError(f"{name} is {value}, it must be at least {rule['least']}")
                if rule["above"] is not None and not value > rule["above"]:
                    raise ConfigError(f"{name} is {value}, it must be more than {rule['above']}")


def run_app(app: typer.Typer) -> None:
    """Run the command that the process was given; an error of kvconnect is one line and exit code 2."""
    try:
        app()
    except KVConnectError as error:
        typer.echo(f"{error}", err=True)
        sys.exit(2)


def run_benchmark(name: str, run: Benchmark, options: Any, *, json_output: bool) -> int:
    """Run a benchmark, and print what it found. Returns the exit code."""
    report = Report(name, json_output=json_output)
    code = run(options, report)
    report.show()
    return code or 0


def add_command(app: typer.Typer, name: str, text: str, run: Benchmark) -> None:
    """Add a benchmark as a command, whose options are the fields of its ``Options``."""
    kind = get_type_hints(run)["options"]
    made = fields(kind)

    def call(*, json_output: bool, **given: Any) -> None:
        values = {one.name: _value(given[one.name], one.metadata["parse"]) for one in made}
        raise typer.Exit(run_benchmark(name, run, kind(**values), json_output=json_output))

    hints = get_type_hints(kind)
    keyword = inspect.Parameter.KEYWORD_ONLY
    json_lines = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
    parameters = [inspect.Parameter("json_output", keyword, default=False, annotation=json_lines)]
    for one in made:
        default: Any = one.default
        annotation, parse = hints[one.name], one.metadata["parse"]
        is_tuple = get_origin(annotation) is tuple
        if is_tuple:
            annotation, default = get_args(annotation)[0], list(default)
        if parse:
            annotation = str
            default = [str(each) for each in default] if is_tuple else default and str(default)
        flag = one.metadata["flag"] or one.name.replace("_", "-")
        shown = typer.Option(f"--{flag}", help=one.metadata["text"])
        annotation = Annotated[list[annotation] if is_tuple else annotation, shown]  # type: ignore[valid-type]
        parameters.append(inspect.Parameter(one.name, keyword, default=default, annotation=annotation))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    app.command(name, help=text)(call)


def _value(given: Any, parse: Callable[[str], Any] | None) -> Any:
    if isinstance(given, list):
        return tuple(_value(one, parse) for one in given)
    return given if parse is None or given is None else parse(given)


def parse_extra(text: str) -> dict[str, Any]:
    """Read further settings of ``kv_connector_extra_config`` from a JSON object.

    Raises:
        ConfigError: it is not one.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"extra is {text!r}, which is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"extra is {text!r}, it must be a JSON object")
    return found


def extra_option() -> Any:
    """Settings that a benchmark passes on."""
    return option(None, "Further settings of kv_connector_extra_config, a JSON object.", parse=parse_extra)


def carrying_protocol(engine: str, device: str) -> str:
    """By which protocol an engine carries the bytes: left at auto, CPU caches of one machine share memory."""
    return PROTOCOLS.get(engine, "auto") if device == "cpu" else "auto"


def environment_option() -> Any:
    """See ``parse_environment``."""
    return option(
        (), "NAME=VALUE is set in the children only; NAME alone takes it away (repeatable).", flag="env"
    )


def timeout_option() -> Any:
    """What bounds every step of a child."""
    return option(120.0, "Seconds that one step of a child may take.", above=0)


def parse_environment(assignments: Sequence[str]) -> dict[str, str | None]:
    """Read ``NAME=VALUE``, or ``NAME`` alone for a variable that is to be taken away."""
    parts = [assignment.partition("=") for assignment in assignments]
    return {name: value if equals else None for name, equals, value in parts}
