"""The ``kv_transfer_config`` that a node is started with, as vLLM takes it: JSON, or a file with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvconnect.config import CONNECTOR, TransferConfig, parse_kv_transfer_config
from kvconnect.errors import ConfigError

_MOST_BYTES = 1 << 20
_OF_VLLM = (
    *("kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port"),
    *("enable_permute_local_kv", "kv_event_config"),
)
"""Keys of vLLM's object that kvconnect does not read."""


def read_configuration(given: str) -> TransferConfig:
    """What is ours of a configuration, that of a ``MultiConnector`` too. Raises ``ConfigError``."""
    if given.lstrip().startswith("{"):
        return _ours(_decoded(given, "kv_transfer_config"))
    path = Path(given).expanduser()
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{given!r} is neither JSON nor a file that can be read: {error}") from error
    return _ours(_decoded(text, str(path)))


def _decoded(text: str | bytes, where: str) -> Mapping[str, Any]:
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise ConfigError(f"{where} is {decoded!r}, it must be a JSON object")
    return decoded


def _ours(given: Mapping[str, Any]) -> TransferConfig:
    if given.get("kv_connector") == "MultiConnector":
        extra = given.get("kv_connector_extra_config")
        inner = extra.get("connectors") if isinstance(extra, dict) else None
        of_us = [one for one in inner or () if isinstance(one, dict) and one.get("kv_connector") == CONNECTOR]
        if len(of_us) != 1:
            raise ConfigError(
                f"the MultiConnector has {len(of_us)} connectors named {CONNECTOR!r}; accepted: one of them"
            )
        given = {"kv_role": given.get("kv_role"), **of_us[0]}
    return parse_kv_transfer_config({key: value for key, value in given.items() if key not in _OF_VLLM})
