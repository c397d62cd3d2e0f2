"""Reads a ``kv_transfer_config`` that a tool was given as vLLM takes it: JSON, or a file of JSON. No vLLM."""

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


def check_ours(given: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a configuration of our connector, or those in a ``MultiConnector``."""
    for one in our_parts(given):
        parse_kv_transfer_config({key: value for key, value in one.items() if key not in _OF_VLLM})


def _ours(given: Mapping[str, Any]) -> TransferConfig:
    of_us = our_parts(given)
    if len(of_us) != 1:
        raise ConfigError(
            f"the MultiConnector has {len(of_us)} connectors named {CONNECTOR!r}; accepted: one of them"
        )
    return parse_kv_transfer_config({key: value for key, value in of_us[0].items() if key not in _OF_VLLM})


def our_parts(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The configurations in a ``MultiConnector`` that name our connector; this one, if it is none."""
    if given.get("kv_connector") != "MultiConnector":
        return [given]
    extra = given.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, Mapping) else None
    return [
        {"kv_role": given.get("kv_role"), **one}
        for one in inner or ()
        if isinstance(one, Mapping) and one.get("kv_connector") == CONNECTOR
    ]
