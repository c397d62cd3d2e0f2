"""The node that this configuration makes: its keys and its ports. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator

from kvconnect.doctor.facts import Facts
from kvconnect.doctor.findings import Finding, failure, failure_if, warning_if, well
from kvconnect.doctor.hardware import adapters
from kvconnect.rank_config import place_of


def check_node(facts: Facts) -> Iterator[Finding]:
    """What it would meet at its start."""
    config, extra, state = facts.config, facts.extra, facts.bootstrap_port
    if config is None:
        return
    yield well(
        "configuration",
        f"{config.kv_role}, engine {extra.engine}; on a failed load it will {config.kv_load_failure_policy}",
    )
    if facts.key_problem:
        advice = "`kvconnect keys new FILE`, the same FILE on every node, as key_file"
        if "others can use it" in facts.key_problem:
            advice = f"chmod 600 {extra.key_file or 'the files in ' + extra.keys_dir}"
        yield failure("key", facts.key_problem, advice)
    else:
        yield warning_if(extra.insecure, "key", facts.key, "leave `insecure` out: a key is made by itself")
    yield from _ranks(facts)
    yield _port(facts)
    if extra.bootstrap_port and config.is_producer and facts.own is None and not facts.ranks.first:
        wrong = state.problem or ("is taken" if state.taken else "")
        found = f"{extra.listens_at}:{extra.bootstrap_port} {wrong or 'is free'}"
        yield failure_if(wrong, "bootstrap port", found, "set another one, and tell the router (--prefill)")


def _ranks(facts: Facts) -> Iterator[Finding]:
    """The ranks that settings name, and whether what they name is here."""
    devices = sorted({*facts.interfaces, *(port.device for port in facts.machine.rdma)})
    for ranks, own in facts.ranks.places.items():
        missing = [name for name in adapters(own.device_name) if name not in devices]
        place = place_of(own.host, own.bind, own.device_name)
        if ranks in facts.ranks.absent:
            yield well(f"ranks {ranks}", f"{place}, on another machine")
        else:
            found = f"{place}, and {', '.join(missing)} is not here" if missing else place
            yield failure_if(missing, f"ranks {ranks}", found, f"devices here are {', '.join(devices)}")


def _port(facts: Facts) -> Finding:
    extra, state = facts.extra, facts.port
    shown = f"{extra.listens_at}:{extra.port + facts.ranks.first}"
    if state.problem:
        advice = "host, or bind, has to be an address of this machine (ip address)"
        return failure("port", f"{shown} cannot be listened on: {state.problem}", advice)
    if facts.own is not None:
        own = facts.own.description
        return well("port", f"a node serves on {shown}: {own.role}, release {own.release}, {own.lane}")
    if state.taken:
        found = f"{shown} is taken, by no node with our key: {facts.own_problem or facts.key_problem}"
        return failure("port", found, "stop what listens there (ss -ltnp), or set another port")
    if not extra.port:
        return well("port", f"a free one of {extra.listens_at} at each start; rank r takes one more")
    return well("port", f"{shown} is free; rank r takes {extra.port} + r")
