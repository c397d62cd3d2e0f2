"""The plugin entry point: registers the transfer backend ``kvconnect`` with SGLang, and checks its settings.

SGLang runs it in every process of every server, also with other backends: so it imports nothing slow, and
nothing of ``prometheus_client``, which must not be imported before SGLang has set where its values lie.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

BACKEND = "kvconnect"
_LINKER_FLAG, _VARIABLE = "enable_unified_cache_external_linker", "KVCONNECT_CONFIG"
_CLASSES = {
    "manager": ("kvconnect.sglang.conn", "KVConnectManager"),
    "sender": ("kvconnect.sglang.conn", "KVConnectSender"),
    "receiver": ("kvconnect.sglang.conn", "KVConnectReceiver"),
    "bootstrap_server": ("kvconnect.sglang.bootstrap_server", "KVConnectBootstrapServer"),
}
"""By SGLang's name for it, the module and the class. Others, as of warm-up requests, are SGLang's own."""


@functools.cache
def register() -> None:
    """Add the backend to SGLang's. Once per process."""
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_disagg_transfer_backend_choices

    add_disagg_transfer_backend_choices([BACKEND])
    _add_member(utils.TransferBackend)
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _class_of, HookType.AROUND)
    HookRegistry.register("sglang.srt.server_args.prepare_server_args", _check_arguments, HookType.AFTER)


def _add_member(backends: Any) -> None:
    """Add a member to an enumeration that is closed otherwise: SGLang looks the backend up in it."""
    member = object.__new__(backends)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    backends._member_names_.append(member._name_)
    backends._member_map_[member._name_] = backends._value2member_map_[BACKEND] = member


def _class_of(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    found = _CLASSES.get(class_type.value)
    if transfer_backend.value != BACKEND or found is None:
        return original(transfer_backend, class_type)
    return getattr(importlib.import_module(found[0]), found[1])


def _check_arguments(given: Any, *arguments: Any, **more: Any) -> None:
    """End the start of a server that uses kvconnect with settings that cannot be used."""
    mode = getattr(given, "disaggregation_mode", "null")
    is_backend = getattr(given, "disaggregation_transfer_backend", "") == BACKEND and mode != "null"
    if not (is_backend or getattr(given, _LINKER_FLAG, False) or _VARIABLE in os.environ):
        return
    from kvconnect.errors import ConfigError
    from kvconnect.sglang.environment import check_settings

    try:
        check_settings(mode if is_backend else "", given, os.environ)
    except ConfigError as error:
        # SGLang logs exceptions of plugins, and goes on.
        print(f"kvconnect: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
