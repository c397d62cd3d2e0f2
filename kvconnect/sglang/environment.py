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
_ACCEPTED = {
    **dict.fromkeys(("enable_pd_role_switch", "enable_hisparse", "enable_kv_cache_sharding"), False),
    **dict.fromkeys(("enable_dsa_cache_layer_split", "disaggregation_enable_kv_checksum"), False),
    "disaggregation_decode_allocation_policy": "early",
    **dict.fromkeys(("disaggregation_decode_host_receive_threshold", "attn_cp_size", "dcp_size"), 1),
}
"""Of options of SGLang, the only value that works with this backend."""


def read_settings(mode: str, environ: Mapping[str, str], first_rank: int = 0) -> TransferConfig:
    """The settings of a server in SGLang's disaggregation ``mode``. Raises ``ConfigError``.

    ``first_rank``: the number of a data-parallel engine's first rank; every rank has a port of its own.
    """
    given = environ.get(VARIABLE, "").strip()
    if not given:
        raise ConfigError(
            f"{VARIABLE} is not set; accepted: a JSON object with the keys of kv_connector_extra_config, or "
            "the path of a file with one; {} for two servers on this machine"
        )
    try:
        is_text = given.startswith("{")
        read = json_object(given, "it") if is_text else read_file(Path(given).expanduser(), dict)
        unused = [key for key in _UNUSED if key in read]
        refuse([f"it has {key!r}, which SGLang's backend does not use; leave it out" for key in unused])
        made = {"load_timeout_s": _DEFAULT_LOAD_S, **read}
        config = parse_kv_transfer_config({"kv_role": _ROLES[mode], "kv_connector_extra_config": made})
        if config.extra.engine == "none":
            raise ConfigError("engine is 'none'; accepted: an engine, or auto")
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}: {error}") from error
    # P may receive a request, whose scheduler is busy, long after D has asked for it.
    extra, port = config.extra, config.extra.port and config.extra.port + first_rank
    extra = msgspec.structs.replace(
        extra, early_fetch_s=extra.load_timeout_s, port=port, first_rank=first_rank
    )
    return msgspec.structs.replace(config, kv_connector_extra_config=extra)


def check_settings(mode: str, server_args: Any) -> None:
    """Raise ``ConfigError`` with all that is known to fail before a model is loaded."""
    config = read_settings(mode, os.environ)
    load_keyring(config.extra, os.environ)
    refuse(list(_unsupported(server_args)))


def _unsupported(server_args: Any) -> Iterator[str]:
    """Options of SGLang that do not work with this backend."""
    if os.environ.get("SGLANG_DISAGG_STAGING_BUFFER", "0").lower() not in ("", "0", "false"):
        yield "SGLANG_DISAGG_STAGING_BUFFER is set; accepted by the transfer backend kvconnect: unset"
    for name, accepted in _ACCEPTED.items():
        if (value := getattr(server_args, name, None)) not in (None, accepted):
            option = name.replace("_", "-")
            yield f"--{option} is {value}; accepted by the transfer backend kvconnect: {accepted}"
