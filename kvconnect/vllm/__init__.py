"""The connector class that vLLM loads: ``"kv_connector_module_path": "kvconnect.vllm"``.

Everything that knows a vLLM type lies in this folder, and it is the only one that imports vLLM.
"""

from kvconnect.vllm.connector import KVConnect

__all__ = ["KVConnect"]
