"""Reads ``KVCONNECT_CONFIG``: the keys of ``kv_connector_extra_config``, as JSON or a file of JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
_UNUSED = ("sources", "bootstrap_port", "stream_min_tokens", "drain_s")
"""Keys that this backend has no use for."""
_NO_USE = "SGLang's servers do not use; leave it out"
_UNUSED_OFFLOAD = (
    *("decoded", "checkpoint_tokens", "pin_quota", "peer_share", "tenant_key"),
    *("park_share", "park_after_s"),
)
"""Keys of ``offload`` that the linker has no use for."""
_LINKER = "kvconnect.sglang.linker"
_ACCEPTED = {
    **dict.fromkeys(("enable_pd_role_switch", "enable_hisparse", "enable_kv_cache_sharding"), False),
    **dict.fromkeys(("enable_dsa_cache_layer_split", "disaggregation_enable_kv_checksum"), False),
    "disaggregation_decode_allocation_policy": "early",
    **dict.fromkeys(("disaggregation_decode_host_receive_threshold", "attn_cp_size", "dcp_size"), 1),
}
"""Of options of SGLang, the only value that works with this backend."""
_BESIDE_LINKER = {"enable_lora": False, "speculative_algorithm": None, "pp_size": 1, "attn_cp_size": 1}
"""Of options of SGLang, the only value with which the linker keeps KV."""


def read_settings(mode: str, environ: Mapping[str, str], first_rank: int = 0) -> TransferConfig:
    """The settings of transfers in SGLang's disaggregation ``mode``. Raises ``ConfigError``.

    ``first_rank``: the number of a data-parallel engine's first rank; every rank has a port of its own.
    """
    made = {"load_timeout_s": _DEFAULT_LOAD_S, **_given(environ)}
    # The linker's, which has rows of its own.
    made.pop("offload", None)
    with _named():
        refuse([f"it has {key!r}, which {_NO_USE}" for key in _UNUSED if key in made])
        config = parse_kv_transfer_config({"kv_role": _ROLES[mode], "kv_connector_extra_config": made})
        if config.extra.engine == "none":
            raise ConfigError("engine is 'none'; accepted: an engine, or auto")
    # P may receive a request, whose scheduler is busy, long after D has asked for it.
    extra, port = config.extra, config.extra.port and config.extra.port + first_rank
    extra = msgspec.structs.replace(
        extra, early_fetch_s=extra.load_timeout_s, port=port, first_rank=first_rank
    )
    return msgspec.structs.replace(config, kv_connector_extra_config=extra)


def read_offload_settings(
    server_args: Any, environ: Mapping[str, str], *, is_alone: bool = False
) -> TransferConfig:
    """The settings of the linker. Raises ``ConfigError``. ``is_alone``: the server transfers nothing."""
    refuse(list(_refused_options(server_args, _BESIDE_LINKER, "linker")))
    given = _given(environ)
    with _named():
        if not isinstance(offload := given.get("offload"), dict):
            raise ConfigError(
                "it has no 'offload', which kvconnect's linker needs; accepted: an object with at least "
                'cpu_bytes, as {"offload": {"cpu_bytes": 8589934592}}'
            )
        unused = [f"it has {key!r}, which {_NO_USE}" for key in given if is_alone and key != "offload"]
        unused += [f"it has 'offload.{key}', which {_NO_USE}" for key in _UNUSED_OFFLOAD if key in offload]
        refuse(unused)
        made = {"engine": "none", "offload": offload}
        return parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": made})


def is_linked(server_args: Any) -> bool:
    """Whether a server loads kvconnect's linker."""
    wanted = getattr(server_args, "unified_cache_external_linker_config", None) or {}
    is_dynamic = getattr(server_args, "unified_cache_external_linker_backend", "") == "dynamic"
    is_on = is_dynamic and getattr(server_args, "enable_unified_cache_external_linker", False)
    return bool(is_on) and wanted.get("linker_module_path") == _LINKER


def check_settings(mode: str, server_args: Any, environ: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` with all that is known to fail before a model is loaded.

    ``mode``: as SGLang has it where the server transfers KV over kvconnect, else empty.
    """
    if mode:
        config = read_settings(mode, environ)
        load_keyring(config.extra, environ)
        refuse(list(_unsupported(server_args)))
    if is_linked(server_args):
        read_offload_settings(server_args, environ, is_alone=not mode)
    elif environ.get(VARIABLE, "").strip() and "offload" in _given(environ):
        raise ConfigError(
            f"{VARIABLE} has 'offload', and the server does not load kvconnect's linker; accepted: with it "
            "--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic "
            "--unified-cache-external-linker-config "
            f'\'{{"linker": "KVConnectLinker", "linker_module_path": "{_LINKER}"}}\', or no offload'
        )


def _given(environ: Mapping[str, str]) -> dict[str, Any]:
    """The object that the variable has, or the file that it names. Raises ``ConfigError``."""
    given = environ.get(VARIABLE, "").strip()
    if not given:
        raise ConfigError(
            f"{VARIABLE} is not set; accepted: a JSON object with the keys of kv_connector_extra_config, or "
            "the path of a file with one; {} for two servers on this machine"
        )
    with _named():
        if given.startswith("{"):
            return dict(json_object(given, "it"))
        return dict(read_file(Path(given).expanduser(), dict))


@contextmanager
def _named() -> Iterator[None]:
    """Mistakes are those of the variable."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}: {error}") from error


def _unsupported(server_args: Any) -> Iterator[str]:
    """Options of SGLang that do not work with this backend."""
    if os.environ.get("SGLANG_DISAGG_STAGING_BUFFER", "0").lower() not in ("", "0", "false"):
        yield "SGLANG_DISAGG_STAGING_BUFFER is set; accepted by the transfer backend kvconnect: unset"
    yield from _refused_options(server_args, _ACCEPTED, "transfer backend kvconnect")


def _refused_options(server_args: Any, accepted: Mapping[str, Any], by: str) -> Iterator[str]:
    for name, only in accepted.items():
        if (value := getattr(server_args, name, None)) not in (None, only):
            option = name.replace("_", "-")
            yield f"--{option} is {value}; accepted by the {by}: {only}"
