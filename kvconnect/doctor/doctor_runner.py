"""``kvconnect doctor``: gathers, checks, and shows a table or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvconnect.addresses import read_address
from kvconnect.doctor.facts import Facts, Probes
from kvconnect.doctor.findings import Finding, Level, failure, warning
from kvconnect.doctor.hardware import check_hardware
from kvconnect.doctor.measure import check_rates, measure
from kvconnect.doctor.node import check_node
from kvconnect.doctor.node_pair import check_pair, meet, unreached
from kvconnect.doctor.software import check_software
from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.showing import printable
from kvconnect.vllm.configuration import read_configuration

_WIDTH = 80
_COLOURS = {Level.PASS: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}


def run_doctor(configuration: str | None, peers: Sequence[str], *, measured: bool, json_output: bool) -> int:
    """Print what was found; 1 if anything of it is a failure. Raises as ``examine`` does."""
    findings = examine(configuration, Probes(), peers, measured=measured)
    works = all(finding.level is not Level.FAILURE for finding in findings)
    if json_output:
        print(msgspec.json.encode({"works": works, "findings": findings}).decode())
    else:
        _print(findings)
    return 0 if works else 1


def examine(
    configuration: str | None, probes: Probes, peers: Sequence[str] = (), *, measured: bool = False
) -> list[Finding]:
    """Look at everything. Raises ``ConfigError``: a peer is no address."""
    addresses = [read_address(peer, "--peer") for peer in peers]
    findings, config = [], None
    try:
        config = read_configuration(configuration) if configuration is not None else None
    except ConfigError as error:
        findings.append(failure("configuration", str(error), "mend it; docs/configuration.md has every key"))
    facts = Facts(config, probes)
    for check in (check_node, check_software, check_hardware):
        findings += check(facts)
    for peer, address in zip(peers, addresses, strict=True):
        if not facts.key_problem:
            findings += _ask(facts, probes, peer, address, measured=measured)
    return findings


def _ask(
    facts: Facts, probes: Probes, peer: str, address: tuple[str, int], *, measured: bool
) -> Iterator[Finding]:
    try:
        pair = meet(address, facts, probes)
        yield from check_pair(facts, pair)
    except KVConnectError as error:
        yield unreached(peer, error)
        return
    if not measured or not pair.has_one_protocol:
        return
    if not pair.peer[0].description.introduction.scratch_bytes:
        found = "the peer has no scratch memory: not measured"
        yield warning("rate", found, "ask a node that hands over KV")
        return
    try:
        yield from check_rates(facts, measure(facts, pair.peer[0], address))
    except KVConnectError as error:
        advice = "look at the rows of engine, transport and caches"
        yield failure("rate", f"nothing came over: {error}", advice)


def _print(findings: Sequence[Finding]) -> None:
    console = Console(width=_WIDTH, highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(width=7, no_wrap=True)
    table.add_column(width=15)
    table.add_column(ratio=1, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.level]
        text = escape(printable(finding.found))
        if finding.advice:
            text += f"\n[bold]> {escape(printable(finding.advice))}[/]"
        table.add_row(f"[{colour}]{finding.level.value}[/]", escape(finding.about), text)
    console.print(table)
    counts = Counter(finding.level for finding in findings)
    console.print(
        f"\n{counts[Level.FAILURE]} failures, {counts[Level.WARNING]} warnings, {counts[Level.PASS]} passed"
    )
