"""Reads a ``kv_transfer_config`` as vLLM takes it: JSON, or a file of JSON. No vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvconnect.config import CONNECTOR, TransferConfig, parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.reading import json_object, read_file

_OF_VLLM = (
    *("kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port"),
    *("enable_permute_local_kv", "kv_event_config"),
)
"""Keys of vLLM's object that kvconnect does not read."""


def read_configuration(given: str) -> TransferConfig:
    """Our part of a configuration; of a ``MultiConnector``, our connector's. Raises ``ConfigError``."""
    if given.lstrip().startswith("{"):
        return _ours(json_object(given, "kv_transfer_config"))
    return read_file(Path(given).expanduser(), _ours)


def our_configs(given: Mapping[str, Any]) -> list[TransferConfig]:
    """Our configurations in a ``MultiConnector``, or the one that this is. Raises ``ConfigError``."""
    ours = [given]
    if given.get("kv_connector") == "MultiConnector":
        extra = given.get("kv_connector_extra_config")
        inner = extra.get("connectors") if isinstance(extra, Mapping) else None
        ours = [
            {"kv_role": given.get("kv_role"), **one}
            for one in inner or ()
            if isinstance(one, Mapping) and one.get("kv_connector") == CONNECTOR
        ]
    return [
        parse_kv_transfer_config({key: value for key, value in one.items() if key not in _OF_VLLM})
        for one in ours
    ]


def _ours(given: Mapping[str, Any]) -> TransferConfig:
    found = our_configs(given)
    if len(found) != 1:
        raise ConfigError(
            f"the MultiConnector has {len(found)} connectors named {CONNECTOR!r}; accepted: one of them"
        )
    return found[0]
