"""Every bound and deadline of the router in one frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from kvconnect.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Bounds and deadlines.

    Attributes:
        connect_timeout_s: to reach a node, name look-up included.
        prefill_timeout_s: for all of a prefill node's answer, of at most ``max_answer_bytes``.
        decode_timeout_s: until a decode node's first byte, and between any two of its bytes.
        body_timeout_s: for a client to send its whole body, of at most ``max_body_bytes``.
        max_in_flight: requests served at once; more are refused with 503.
        retries: further nodes tried where one cannot be reached.
        failures_to_eject: failures to reach a node, in a row, after which it leaves rotation; after
            ``eject_s`` it is probed.
        drain_timeout_s: after SIGTERM, for the requests under way to end.

    Raises:
        ConfigError: a value is out of range.
    """

    connect_timeout_s: float = 3.0
    prefill_timeout_s: float = 120.0
    decode_timeout_s: float = 120.0
    body_timeout_s: float = 30.0
    max_body_bytes: int = 16 << 20
    max_answer_bytes: int = 16 << 20
    max_in_flight: int = 1024
    retries: int = 2
    check_interval_s: float = 1.0
    check_timeout_s: float = 2.0
    failures_to_eject: int = 3
    eject_s: float = 5.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("retries", "drain_timeout_s"):
                if value < 0:
                    raise ConfigError(f"{item.name} is {value}, it must be 0 or more")
            elif not value > 0:
                raise ConfigError(f"{item.name} is {value}, it must be above 0")


def clean_url(url: str) -> str:
    """A node's base URL without a trailing slash.

    Raises:
        ConfigError: not http or https, no host, a bad port, or parts that a base URL does not have.
    """
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
