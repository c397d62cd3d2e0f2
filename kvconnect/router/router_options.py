"""The router's options and limits. A field with a text is an option of ``kvconnect router``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Annotated
from urllib.parse import urlsplit

from kvconnect.errors import ConfigError

NAME = "dns+"
"""Prefix of a URL with a DNS name, each address of which is one node."""
_RANKED = re.compile(r"(https?://(?:\[[^\]]+\]|[^@/?#:\[]+)(?::\d+)?)/?@(\d{1,5})")

FLOWS = ("sequential", "parallel")
"""How a request may run through its two nodes."""
POLICIES = ("least-loaded", "prefix")
FIRST = ("prefill", "decode")


@dataclass(frozen=True)
class RouterOptions:
    """The nodes, and how requests are routed. Raises ``ConfigError`` for an unknown choice."""

    decode: Annotated[
        list[str],
        "URL of a decode node, or a plain server; may be given several times. URL@RANK is one data-parallel "
        "rank of a server, here and in all options; of dns+URL every address of the name is a node, and is "
        "looked up again and again.",
    ]
    prefill: Annotated[
        list[str], "URL of a prefill node; may be given several times. None: all are plain servers."
    ] = field(default_factory=list)
    flow: Annotated[str, "sequential asks the prefill node first, parallel asks both nodes at once."] = (
        "sequential"
    )
    policy: Annotated[
        str,
        "Which node takes a request: the least loaded, or by prefix the one that has most of its prompt, in "
        "any tier, with regard to load. Of plain servers and of prefill nodes.",
    ] = "least-loaded"
    bootstrap_port: Annotated[
        list[str],
        "The nodes are SGLang servers, and this is the bootstrap port of all prefill nodes (theirs is 8998 "
        "unless set), or as URL=PORT of one. Both nodes are asked at once.",
    ] = field(default_factory=list)
    kv_event_source: Annotated[
        list[str],
        "For policy prefix, URL=tcp://HOST:PORT of a node's KV events; * as the host of dns+URL.",
    ] = field(default_factory=list)
    kv_event_replay_source: Annotated[
        list[str], "URL=tcp://HOST:PORT that answers what was missed of them."
    ] = field(default_factory=list)
    kv_source: Annotated[
        list[str], "URL=HOST:PORT of a node's side channel, where its peers may pull what it has."
    ] = field(default_factory=list)
    decode_fallback: Annotated[
        bool,
        "Have the decode node compute the prompt where no prefill node is left, or a request to one fails "
        "(no connection, 5xx, 408, 429, timeout, broken answer); otherwise that is the answer.",
    ] = True

    first_token: Annotated[
        str,
        "Which node the first token of a streamed answer comes from: prefill, as soon as that has it, where "
        "every decode node was seen to go on from a token that it is given; or decode.",
    ] = "prefill"
    admin: Annotated[
        str,
        "HOST:PORT where /nodes shows, adds and drains nodes; empty for nowhere. Any client of it decides "
        "where prompts go.",
    ] = ""

    def __post_init__(self) -> None:
        for name, accepted in (("flow", FLOWS), ("policy", POLICIES), ("first_token", FIRST)):
            if getattr(self, name) not in accepted:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(accepted)}")


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Every bound and deadline. Raises ``ConfigError`` for a value out of range.

    ``failures_to_eject``: after this many failures in a row to reach a node, the node leaves rotation until
    it answers a health check.
    """

    connect_timeout_s: Annotated[float, "Seconds to reach a node, name look-up included."] = 3.0
    prefill_timeout_s: Annotated[float, "Seconds for a whole prefill request."] = 120.0
    decode_timeout_s: Annotated[float, "Seconds to a decode node's first byte, and between its bytes."] = (
        120.0
    )
    body_timeout_s: float = 30.0
    max_body_bytes: Annotated[int, "Largest request body."] = 16 << 20
    max_answer_bytes: int = 16 << 20
    max_in_flight: Annotated[int, "Requests served at once; more get 503."] = 1024
    retries: Annotated[int, "Further nodes tried when one cannot be reached."] = 2
    check_interval_s: float = 1.0
    check_timeout_s: float = 2.0
    failures_to_eject: int = 3
    drain_timeout_s: Annotated[float, "Seconds for requests to end after SIGTERM."] = 30.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("retries", "drain_timeout_s"):
                if value < 0:
                    raise ConfigError(f"{item.name} is {value}, it must be 0 or more")
            elif not value > 0:
                raise ConfigError(f"{item.name} is {value}, it must be above 0")


def split_rank(url: str) -> tuple[str, str]:
    """A node's base URL, and its data-parallel rank in ``URL@RANK``; without one an empty rank."""
    found = _RANKED.fullmatch(url)
    return (found[1], found[2]) if found else (url, "")


def clean_url(url: str) -> str:
    """A node's base URL without a trailing slash; ``NAME`` and ``@RANK`` stay.

    Raises:
        ConfigError: not http or https, no host, a bad port, or parts that a base URL does not have.
    """
    if url.startswith(NAME):
        return NAME + clean_url(url.removeprefix(NAME))
    base, rank = split_rank(url)
    if rank:
        return f"{clean_url(base)}@{int(rank)}"
    try:
        parts = urlsplit(url)
        bad_port = parts.port == 0
    except ValueError:
        bad_port = True
    if bad_port or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not the URL of a node; write it like http://host:8000")
    if parts.username is not None or parts.query or parts.fragment:
        # The text of the URL is not repeated: it may hold a password.
        raise ConfigError(
            f"the URL of node {parts.hostname} must not hold credentials, a query or a fragment"
        )
    return url.rstrip("/")
