"""``kvconnect doctor``: gathers, checks, and shows a table or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvconnect.doctor.configuration import read_configuration
from kvconnect.doctor.facts import Probes, gather
from kvconnect.doctor.findings import Finding, Level, failure
from kvconnect.doctor.hardware import check_hardware
from kvconnect.doctor.node import check_node
from kvconnect.doctor.software import check_software
from kvconnect.errors import ConfigError

_WIDTH = 80
_COLOURS = {Level.PASS: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}


def run_doctor(configuration: str | None, *, json_output: bool = False, probes: Probes | None = None) -> int:
    """Print what was found; 1 if anything of it is a failure."""
    findings = examine(configuration, probes or Probes())
    if json_output:
        print(as_json(findings))
    else:
        _print(findings)
    return int(any(finding.level is Level.FAILURE for finding in findings))


def examine(configuration: str | None, probes: Probes) -> list[Finding]:
    """Look at everything."""
    findings, config = [], None
    try:
        config = read_configuration(configuration) if configuration is not None else None
    except ConfigError as error:
        findings.append(failure("configuration", str(error), "mend it; docs/configuration.md has every key"))
    facts = gather(config, probes)
    for check in (check_node, check_software, check_hardware):
        findings.extend(check(facts))
    return findings


def as_json(findings: Sequence[Finding]) -> str:
    """One object: whether it ``works``, and the ``findings``."""
    works = all(finding.level is not Level.FAILURE for finding in findings)
    return msgspec.json.encode({"works": works, "findings": findings}).decode()


def _print(findings: Sequence[Finding]) -> None:
    console = Console(width=_WIDTH, highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(width=7, no_wrap=True)
    table.add_column(width=15)
    table.add_column(ratio=1, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.level]
        text = escape(finding.found) + (f"\n[bold]> {escape(finding.advice)}[/]" if finding.advice else "")
        table.add_row(f"[{colour}]{finding.level.value}[/]", escape(finding.about), text)
    console.print(table)
    counts = Counter(finding.level for finding in findings)
    console.print(
        f"\n{counts[Level.FAILURE]} failures, {counts[Level.WARNING]} warnings, {counts[Level.PASS]} passed"
    )
