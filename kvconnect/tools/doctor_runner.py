"""``kvconnect doctor``: checks this machine, a configuration and running peers, or compares two caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from kvconnect.errors import ConfigError
from kvconnect.tools.cache_file import CUDA_SLOT_BYTES, read_cache
from kvconnect.tools.cache_pairs import check_nodes
from kvconnect.tools.checks import check_machine
from kvconnect.tools.facts import Facts
from kvconnect.tools.findings import Finding, Level, failure, well
from kvconnect.tools.node_pair import check_peer
from kvconnect.tools.showing import paragraph, size
from kvconnect.vllm.configuration import read_configuration

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


def compare(source: Side, target: Side, tokens: int, configuration: str | None = None) -> Iterator[Finding]:
    """What two nodes would exchange for a request, by their files. Neither needs to run.

    A ``configuration`` replaces that of both files. Raises ``ConfigError`` if a file cannot be used.
    """
    sides = [read_cache(*source), read_cache(*target)]
    if configuration is not None:
        extra = read_configuration(configuration).extra
        sides = [msgspec.structs.replace(side, extra=extra) for side in sides]
    # A model's configuration does not settle all of it.
    slots = f"slots of {size(CUDA_SLOT_BYTES)} where none are set, and no draft model"
    more = "deploy/examples has files that state more"
    yield well("taken for", f"{tokens} tokens in one request; {slots}; {more}")
    engines = [side.extra.engine for side in sides]
    # `auto` takes what the other node has.
    engines = [other if own == "auto" else own for own, other in zip(engines, reversed(engines), strict=True)]
    held, wanted = (side.ranks(engine) for side, engine in zip(sides, engines, strict=True))
    yield from check_nodes(held, wanted, tokens, convert=sides[1].extra.convert_dtype)


def examine(
    configuration: str | None, peers: Sequence[str] = (), tokens: int = 1, *, measured: bool = False
) -> list[Finding]:
    """Check this machine, the configuration and the peers. Raises nothing: every problem is a finding.

    ``tokens`` are those of a request of which caches are compared.
    """
    findings, config = [], None
    try:
        config = read_configuration(configuration) if configuration is not None else None
    except ConfigError as error:
        findings.append(failure("configuration", str(error), "mend it; docs/configuration.md has every key"))
    facts = Facts(config)
    findings += check_machine(facts)
    for peer in peers:
        if not facts.key_problem:
            findings += check_peer(facts, peer, tokens, measured=measured)
    return findings


def _print(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(paragraph(f"{finding.level.value:<8}{finding.about:<15} ", finding.found, 24))
        if finding.advice:
            print(paragraph(f"{'':24}> ", finding.advice, 24))
    counts = Counter(finding.level for finding in findings)
    print(
        f"\n{counts[Level.FAILURE]} failures, {counts[Level.WARNING]} warnings, {counts[Level.PASS]} passed"
    )
