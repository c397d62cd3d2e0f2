"""The node that this configuration makes: its keys and its ports. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator

from kvconnect.doctor.facts import Facts
from kvconnect.doctor.findings import Finding, failure, failure_if, warning_if, well


def check_node(facts: Facts) -> Iterator[Finding]:
    """What it would meet at its start."""
    config, extra, state = facts.config, facts.extra, facts.bootstrap_port
    if config is None:
        return
    yield well(
        "configuration",
        f"{config.kv_role}, engine {extra.engine}, path {extra.path}; on a failed load it will "
        f"{config.kv_load_failure_policy}",
    )
    if facts.key_problem:
        advice = "`kvconnect keys new FILE`, the same FILE on every node, as key_file"
        if "others can use it" in facts.key_problem:
            advice = f"chmod 600 {extra.key_file or 'the files in ' + extra.keys_dir}"
        yield failure("key", facts.key_problem, advice)
    else:
        yield warning_if(extra.insecure, "key", facts.key, "leave `insecure` out: a key is made by itself")
    yield _port(facts)
    if extra.bootstrap_port and config.is_producer and facts.own is None:
        wrong = state.problem or ("is taken" if state.taken else "")
        found = f"{extra.host}:{extra.bootstrap_port} {wrong or 'is free'}"
        yield failure_if(wrong, "bootstrap port", found, "set another one, and tell the router (--prefill)")


def _port(facts: Facts) -> Finding:
    extra, state = facts.extra, facts.port
    shown = f"{extra.host}:{extra.port}"
    if state.problem:
        advice = "host has to be an address of this machine that peers reach (ip address)"
        return failure("port", f"{shown} cannot be listened on: {state.problem}", advice)
    if facts.own is not None:
        own = facts.own.description
        return well("port", f"a node serves on {shown}: {own.role}, release {own.release}, {own.lane}")
    if state.taken:
        found = f"{shown} is taken, by no node with our key: {facts.own_problem or facts.key_problem}"
        return failure("port", found, "stop what listens there (ss -ltnp), or set another port")
    if not extra.port:
        return well("port", f"a free one of {extra.host} at each start; rank r takes one more")
    return well("port", f"{shown} is free; rank r takes {extra.port} + r")
