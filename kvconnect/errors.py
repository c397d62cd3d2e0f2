"""The errors of kvconnect. The class states who must act; the text states the action.

Every error that reaches a user names the field, the value and the accepted values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvconnect.outcome import Cause, Reason


class KVConnectError(Exception):
    """Base of all errors that kvconnect raises on purpose."""


class ConfigError(KVConnectError):
    """The operator must change the configuration."""


class LayoutError(ConfigError):
    """The cache has a shape that cannot be expressed, or two caches cannot be matched."""


class LocalError(KVConnectError):
    """The caller misused an interface: a bug on this side of the link."""


class IllegalTransition(LocalError):
    """An event that is impossible in its record's state, which is unchanged."""


class PeerError(KVConnectError):
    """The peer broke the protocol, refused, or left; ``cause``: see ``Reason``."""

    def __init__(self, text: str, cause: Cause = Cause.PROTOCOL) -> None:
        super().__init__(text)
        self.cause = cause

    @classmethod
    def of(cls, reason: Reason) -> PeerError:
        """The error of an existing reason."""
        return cls(reason.text, reason.cause)

    @property
    def reason(self) -> Reason:
        """The reason to send to the peer."""
        return self.cause(str(self))


def listed(values: Iterable[Any]) -> str:
    """Values in the text of an error, in order."""
    return ", ".join(map(str, sorted(values))) or "none"


class EngineError(KVConnectError):
    """A transfer library or the network below it failed."""
