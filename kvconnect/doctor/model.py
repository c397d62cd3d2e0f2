"""What kvconnect would refuse of a model's KV cache, between two nodes of one configuration. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvconnect.doctor.facts import Facts
from kvconnect.doctor.findings import Finding, failure, warning
from kvconnect.doctor.pair import check_paths
from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.explain.hugging_face import read_cache
from kvconnect.explain.report import make_report

_TOKENS = 8192


class ModelAsked(NamedTuple):
    """Its folder, ``config.json`` or file of its cache, and the tensor-parallel size; 0: the file's."""

    path: Path
    tp_size: int = 0


def check_model(facts: Facts, asked: ModelAsked) -> Iterator[Finding]:
    """What ``kvconnect explain`` finds of a node that hands over to one like it, rank by rank."""
    try:
        cache = read_cache(asked.path, {"tp_size": asked.tp_size} if asked.tp_size else {})
    except ConfigError as error:
        yield warning("model", f"not looked at: {error}", "a file of its cache, as in deploy/examples")
        return
    device = "cuda" if facts.machine.gpus else "cpu"
    ours = msgspec.structs.replace(cache, extra=facts.extra, device=device)
    try:
        report = make_report(ours, ours, _TOKENS)
    except KVConnectError as error:
        yield failure("model", str(error), "another tensor-parallel or block size")
        return
    closed = ((f"{pair.source_rank} > {pair.target_rank}", pair.closed) for pair in report.pairs)
    yield from check_paths("model", closed)
