"""``kvconnect doctor``: checks this machine, a configuration and running peers, or compares two caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.tools.cache_file import CacheFile, read_cache
from kvconnect.tools.cache_pairs import CUDA_SLOT_BYTES, check_caches
from kvconnect.tools.checks import check_hardware, check_node, check_software
from kvconnect.tools.facts import Facts, Probes
from kvconnect.tools.findings import Finding, Level, failure, well
from kvconnect.tools.link_check import check_link
from kvconnect.tools.node_pair import check_pair, meet, unreached
from kvconnect.tools.server_client import side_channels
from kvconnect.tools.showing import printable, size
from kvconnect.vllm.configuration import read_configuration

_WIDTH = 80
_COLOURS = {Level.PASS: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}


Side = tuple[Path, Mapping[str, int]]
"""A node's cache or model file, and replacements for its ``tp_size`` and ``block_size``."""


def show(findings: Sequence[Finding], *, json_output: bool) -> int:
    """Print the findings. Returns the exit code: 1 with a failure, else 0."""
    works = all(finding.level is not Level.FAILURE for finding in findings)
    if json_output:
        print(msgspec.json.encode({"works": works, "findings": findings}).decode())
    else:
        _print(findings)
    return 0 if works else 1


def compare(source: Side, target: Side, tokens: int, configuration: str | None = None) -> list[Finding]:
    """What two nodes would exchange for a request, by their files. Neither needs to run.

    A ``configuration`` replaces that of both files. Raises as ``check_caches``.
    """
    held, wanted = read_cache(*source), read_cache(*target)
    if configuration is not None:
        extra = read_configuration(configuration).extra
        held, wanted = (msgspec.structs.replace(side, extra=extra) for side in (held, wanted))
    return [*_taken_for(held, wanted, tokens), *check_caches(held, wanted, tokens)]


def _taken_for(held: CacheFile, wanted: CacheFile, tokens: int) -> Iterator[Finding]:
    """What the comparison takes the two caches to be: a model's configuration does not settle all of it."""
    sides = {"prefill node": held, "decode node": wanted}
    texts = {name: "; ".join(dict.fromkeys(map(str, side.layers))) for name, side in sides.items()}
    if len(set(texts.values())) == 1:
        texts = {"both nodes": texts["prefill node"]}
    for name, text in texts.items():
        yield well("taken for", f"{name}: {text}")
    slots = f"slots of {size(CUDA_SLOT_BYTES)} where none are set, and no draft model"
    yield well(
        "taken for", f"{tokens} tokens in one request; {slots}; deploy/examples has files that say more"
    )


def examine(
    configuration: str | None,
    probes: Probes | None = None,
    peers: Sequence[str] = (),
    *,
    measured: bool = False,
) -> list[Finding]:
    """Check this machine, the configuration and the peers. Raises nothing: every problem is a finding."""
    findings, config = [], None
    try:
        config = read_configuration(configuration) if configuration is not None else None
    except ConfigError as error:
        findings.append(failure("configuration", str(error), "mend it; docs/configuration.md has every key"))
    probes = probes or Probes()
    facts = Facts(config, probes)
    for check in (check_node, check_software, check_hardware):
        findings += check(facts)
    for peer in peers:
        if not facts.key_problem:
            findings += _ask(facts, probes, peer, measured=measured)
    return findings


def _ask(facts: Facts, probes: Probes, peer: str, *, measured: bool) -> Iterator[Finding]:
    try:
        address = side_channels(peer, "--peer")[0]
        pair = meet(address, facts, probes)
        yield from check_pair(facts, pair)
    except KVConnectError as error:
        yield unreached(peer, error)
        return
    if measured and pair.has_one_protocol:
        try:
            yield from check_link(facts, pair.peer[0], address)
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
