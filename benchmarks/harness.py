"""What all benchmarks share: options as fields of a dataclass, the command made of these, and the report.

A finding is a JSON line at once, or all findings of a kind are one table at the end.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.node.pair_demo import PROTOCOLS

DEVICES = ("cpu", "cuda")


# ---- options


def option(
    default: Any,
    text: str,
    *,
    flag: str = "",
    least: float | None = None,
    above: float | None = None,
    accepted: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
    cpu: Any = None,
    cuda: Any = None,
) -> Any:
    """A field of ``Options``. Its default is accepted, whatever ``least``, ``above`` and ``accepted`` say.

    ``cpu`` and ``cuda`` take the place of the default on that device.
    """
    rule = {"text": text, "flag": flag, "least": least, "above": above, "accepted": accepted, "parse": parse}
    if cuda is not None:
        suited = ", ".join(map(str, cuda)) if isinstance(cuda, tuple) else cuda
        on_cpu = ", ".join(map(str, cpu)) if isinstance(cpu, tuple) else cpu
        rule["text"] = f"{text.rstrip('.')}; default: {suited}, on a CPU {on_cpu}."
    return field(default=default, metadata={**rule, "cpu": cpu, "cuda": cuda})


@dataclass(frozen=True)
class Options:
    """A run of a benchmark; what is left out and has a value that suits the ``device`` gets that.

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
        for one in fields(self):
            if one.metadata["cuda"] is not None and getattr(self, one.name) == one.default:
                object.__setattr__(self, one.name, one.metadata[getattr(self, "device", "cpu")])


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


def carrying_protocol(engine: str, device: str) -> str:
    """By which protocol an engine carries the bytes: left at auto, CPU caches of one machine share memory."""
    return PROTOCOLS.get(engine, "auto") if device == "cpu" else "auto"


@dataclass(frozen=True)
class PairOptions(Options):
    """A run with two workers in processes of their own."""

    device: str = option(
        "cpu", "cpu, or cuda: one GPU for each side if there are two, else one for both.", accepted=DEVICES
    )
    timeout_s: float = option(120.0, "Seconds that one step of a child may take.", above=0)
    extra: Mapping[str, Any] | None = option(
        None, "Further settings of kv_connector_extra_config, a JSON object.", parse=parse_extra
    )
    environment: tuple[str, ...] = option(
        (), "NAME=VALUE is set in the children only; NAME alone takes it away (repeatable).", flag="env"
    )

    @property
    def variables(self) -> dict[str, str | None]:
        """What the children's environment differs by; None takes a variable away."""
        parts = [assignment.partition("=") for assignment in self.environment]
        return {name: value if equals else None for name, equals, value in parts}

    @property
    def devices(self) -> tuple[str, str]:
        """Where prefill and decode live: on two GPUs if there are two.

        Raises:
            ConfigError: there is no GPU.
        """
        if self.device == "cpu":
            return "cpu", "cpu"
        from benchmarks.device import check_device, device_count

        check_device(self.device)
        return "cuda:0", "cuda:1" if device_count() > 1 else "cuda:0"


# ---- the report


def note(text: str) -> None:
    """What a reader of the figures must know, beside them."""
    print(text, file=sys.stderr, flush=True)


class Report:
    """Findings of one benchmark, as dataclasses or dictionaries whose names have their units."""

    def __init__(self, bench: str, *, json_output: bool) -> None:
        self._bench, self.json_output = bench, json_output
        self._kinds: dict[str, list[dict[str, Any]]] = {}

    def add(self, finding: Any, kind: str = "") -> None:
        """Take a finding; ``kind`` tells those of one benchmark that have other fields."""
        values = _rounded(dict(finding) if isinstance(finding, Mapping) else asdict(finding))
        name = kind or self._bench
        self._kinds.setdefault(name, []).append(values)
        self._line(name, values)

    def failed(self, error: Exception, **where: Any) -> None:
        """Show what could not be measured, and why; it is in no table."""
        self._line(self._bench, {**where, "error": str(error)})
        named = ", ".join(f"{key} {value}" for key, value in where.items())
        note(": ".join(filter(None, ("not measured", named, str(error)))))

    def show(self) -> None:
        """Print the tables: what is the same in all findings of a kind stands above its table."""
        if self.json_output:
            return
        console = Console(width=160)
        for kind, findings in self._kinds.items():
            first = findings[0]
            names = [name for name in first if any(one[name] != first[name] for one in findings)]
            if len(findings) == 1:
                table = Table("", "", title=kind, show_header=False)
                for name, value in first.items():
                    table.add_row(name, _text(value))
            else:
                same = (f"{name} {_text(value)}" for name, value in first.items() if name not in names)
                table = Table(*names, title=", ".join([kind, *same]))
                for finding in findings:
                    table.add_row(*(_text(finding[name]) for name in names))
            console.print(table)

    def _line(self, kind: str, values: dict[str, Any]) -> None:
        if self.json_output:
            print(json.dumps({"bench": kind, **values}), flush=True)


def _rounded(value: Any) -> Any:
    """The same with five digits of every float: no clock here has more."""
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


# ---- the command

Benchmark = Callable[[Any, Report], int | None]
"""``bench_NAME(options, report)``; it returns the exit code."""


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
