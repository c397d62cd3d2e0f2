"""The node that this configuration makes: its keys and its port. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator

from kvconnect.doctor.facts import Facts
from kvconnect.doctor.findings import Finding, failure, warning, well


def check_node(facts: Facts) -> Iterator[Finding]:
    """What it would meet at its start."""
    config, extra = facts.config, facts.extra
    if config is None:
        return
    yield well(
        "configuration",
        f"{config.kv_role}, engine {extra.engine}, path {extra.path}; on a failed load it will "
        f"{config.kv_load_failure_policy}",
    )
    if facts.key_problem:
        open_to_others = "others can use it" in facts.key_problem
        yield failure(
            "key",
            facts.key_problem,
            f"chmod 600 {extra.key_file or 'the files in ' + extra.keys_dir}"
            if open_to_others
            else "`kvconnect keys new FILE`, the same FILE on every node, as key_file",
        )
    elif extra.insecure:
        yield warning("key", facts.key, "leave `insecure` out: a key is made by itself")
    else:
        yield well("key", facts.key)
    yield from _port(facts)
    if extra.bootstrap_port and config.is_producer and facts.own is None:
        shown, state = f"{extra.host}:{extra.bootstrap_port}", facts.bootstrap_port
        if state.taken or state.problem:
            found = f"{shown} {state.problem or 'is taken'}"
            yield failure("bootstrap port", found, "set another one, and tell the router (--prefill)")
        else:
            yield well("bootstrap port", f"{shown} is free")


def _port(facts: Facts) -> Iterator[Finding]:
    extra, state = facts.extra, facts.port
    shown = f"{extra.host}:{extra.port}"
    if state.problem:
        yield failure(
            "port",
            f"{shown} cannot be listened on: {state.problem}",
            "host has to be an address of this machine that peers reach (ip address)",
        )
    elif not extra.port:
        yield well("port", f"a free one of {extra.host} at each start; rank r takes one more")
    elif facts.own is not None:
        own = facts.own.description
        yield well("port", f"a node serves on {shown}: {own.role}, release {own.release}, {own.lane}")
    elif state.taken:
        yield failure(
            "port",
            f"{shown} is taken, by no node with our key: {facts.own_problem or facts.key_problem}",
            "stop what listens there (ss -ltnp), or set another port",
        )
    else:
        yield well("port", f"{shown} is free; rank r takes {extra.port} + r")
