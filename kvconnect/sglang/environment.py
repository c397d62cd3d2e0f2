"""Reads ``KVCONNECT_CONFIG``: the keys of ``kv_connector_extra_config``, as JSON or a file of JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvconnect.config import TransferConfig, parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.peer.keyring import load_keyring
from kvconnect.reading import json_object, read_file, refuse

VARIABLE = "KVCONNECT_CONFIG"
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_DEFAULT_LOAD_S = 300.0
"""SGLang's own default for a decode node's wait: its requests wait for their turn on P within this time."""
_UNUSED = ("offload", "sources", "bootstrap_port", "stream_min_tokens", "drain_s")
"""Keys that this backend has no use for."""


def read_settings(mode: str, environ: Mapping[str, str]) -> TransferConfig:
    """The settings of a server in SGLang's disaggregation ``mode``. Raises ``ConfigError``."""
    given = environ.get(VARIABLE, "").strip()
    if not given:
        raise ConfigError(
            f"{VARIABLE} is not set; accepted: a JSON object with the keys of kv_connector_extra_config, or "
            "the path of a file with one; {} for two servers on this machine"
        )
    try:
        extra = (
            json_object(given, "it") if given.startswith("{") else read_file(Path(given).expanduser(), dict)
        )
        refuse(
            [
                f"it has {key!r}, which SGLang's backend does not use; leave it out"
                for key in _UNUSED
                if key in extra
            ]
        )
        made = {"load_timeout_s": _DEFAULT_LOAD_S, **extra}
        config = parse_kv_transfer_config({"kv_role": _ROLES[mode], "kv_connector_extra_config": made})
        if config.extra.engine == "none":
            raise ConfigError("engine is 'none'; accepted: an engine, or auto")
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}: {error}") from error
    # P may receive a request, whose scheduler is busy, long after D has asked for it.
    extra = msgspec.structs.replace(config.extra, early_fetch_s=config.extra.load_timeout_s)
    return msgspec.structs.replace(config, kv_connector_extra_config=extra)


def check_settings(mode: str, server_args: Any) -> None:
    """Raise ``ConfigError`` with all that is known to fail before a model is loaded."""
    config = read_settings(mode, os.environ)
    load_keyring(config.extra, os.environ)
    refuse(list(_unsupported(server_args)))


def _unsupported(server_args: Any) -> Iterator[str]:
    """Options of SGLang that do not work with this backend."""
    for name, off in (
        ("enable_pd_role_switch", False),
        ("enable_hisparse", False),
        ("enable_kv_cache_sharding", False),
        ("enable_dsa_cache_layer_split", False),
        ("disaggregation_enable_kv_checksum", False),
        ("disaggregation_decode_allocation_policy", "early"),
        ("disaggregation_decode_host_receive_threshold", 1),
    ):
        value = getattr(server_args, name, off)
        if value is not None and value != off and not (off == 1 and value >= 1):
            option = name.replace("_", "-")
            yield f"--{option} is {value}; accepted by the transfer backend kvconnect: {off}"
    for name in ("attn_cp_size", "dcp_size"):
        if (value := getattr(server_args, name, 1)) not in (None, 1):
            yield f"--{name.replace('_', '-')} is {value}; accepted by the transfer backend kvconnect: 1"
