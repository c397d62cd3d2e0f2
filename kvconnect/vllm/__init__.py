"""The connector class that vLLM loads, by its name or by ``"kv_connector_module_path": "kvconnect.vllm"``.

Only this folder knows vLLM's types. The class is imported on first access, because every process of every
vLLM server loads the plugin in this folder, also where no connector is configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvconnect.vllm.connector import KVConnect

__all__ = ["KVConnect"]


def __getattr__(name: str) -> Any:
    if name == "KVConnect":
        from kvconnect.vllm.connector import KVConnect

        return KVConnect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
