"""Which addresses D connects to: those that are listed, or that a node of its own cluster has named."""

from __future__ import annotations

from collections import OrderedDict

from kvconnect.addresses import is_loopback
from kvconnect.peer.allow_list import AllowList


class PeerTrust:
    """Addresses that D may fetch from.

    Args:
        allowed: where it is not empty, nothing else counts.
        max_named: how many addresses that handles named are remembered.
    """

    def __init__(self, allowed: AllowList, max_named: int) -> None:
        self._allowed = allowed
        self._max_named = max_named
        self._named: OrderedDict[tuple[str, int], None] = OrderedDict()

    def refusal(self, host: str, port: int, *, vouched: bool) -> str:
        """Why an address must not be connected to, or nothing.

        ``vouched``: a signed handle named it. Otherwise a client did.
        """
        where = f"kv_transfer_params.remote_host and remote_port are {host}:{port}"
        if self._allowed:
            if self._allowed.allows(host, port):
                return ""
            return f"{where}, which kv_connector_extra_config.allow_peers does not have"
        if vouched:
            self._named[host, port] = None
            self._named.move_to_end((host, port))
            while len(self._named) > self._max_named:
                self._named.popitem(last=False)
            return ""
        if (host, port) in self._named or is_loopback(host):
            return ""
        return (
            f"{where}, which no signed handle has named; accepted: peers of a handle, and those in "
            "kv_connector_extra_config.allow_peers"
        )
