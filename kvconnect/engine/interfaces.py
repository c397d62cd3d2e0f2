"""Which network interface an address of this machine belongs to, so that an engine listens only there."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from kvconnect.addresses import interface_addresses, is_address, is_loopback
from kvconnect.errors import ConfigError

log = logging.getLogger("kvconnect.engine")

_RDMA_CARDS = Path("/sys/class/infiniband")
_DEVICES = "UCX_NET_DEVICES"


def ucx_options(
    host: str, device_name: str, options: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """NIXL's parameters for UCX, with the devices that are meant; without any it listens on all interfaces.

    Which RDMA card ``host`` belongs to cannot be known, so with one UCX chooses; else ``host``'s interface is
    taken. Raises ``ConfigError``: several devices are named, of which this parameter would take the first.
    """
    if "," in device_name:
        raise ConfigError(
            f"device_name is {device_name!r}: NIXL takes one device; for several set {_DEVICES} in the "
            "environment"
        )
    configured = options.get("engine_config", "")
    if "NET_DEVICES=" in configured or (environ.get(_DEVICES) and not device_name):
        return dict(options)
    device = device_name
    has_rdma_card = _RDMA_CARDS.is_dir() and any(_RDMA_CARDS.iterdir())
    if not device and (is_loopback(host) or not has_rdma_card):
        device = interface_of(host)
        if not device and is_address(host):
            raise ConfigError(
                f"kv_connector_extra_config.host is {host!r}, which no interface here has, and UCX tells "
                "peers the addresses of its devices alone; accepted: device_name, the device that they reach"
            )
    if not device:
        log.warning(
            "UCX listens on all interfaces: it is not known which belongs to host %s; set device_name, or "
            "close its ports to all but peers",
            host,
        )
        return dict(options)
    return {**options, "engine_config": ",".join(filter(None, (f"NET_DEVICES={device}", configured)))}


def interface_of(host: str) -> str:
    """The interface that has an address; empty if none has, or ``host`` is a name."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return ""
    found = [(name, known) for name, known in interface_addresses() if known.version == address.version]
    if address.is_loopback:
        # All of 127.0.0.0/8 is there, under one address.
        return next((name for name, known in found if known.is_loopback), "")
    return next((name for name, known in found if known == address), "")
