"""The observing connector, with every page as the values of one type: to compare caches of unlike types.

Loaded by vLLM servers under test as ``kv_connector_module_path``. Pages of another type than torch's that
``KVCONNECT_TEST_DIGEST_DTYPE`` names are cast by torch before they are hashed, which shares no code with what
converts them.
"""

from __future__ import annotations

import os

import torch

from tests.vllm import observed

KVConnect = observed.KVConnect
_digest_bytes = observed._digest


def _digest_values(rows: torch.Tensor) -> str:
    wanted = getattr(torch, os.environ["KVCONNECT_TEST_DIGEST_DTYPE"])
    # vLLM hands out caches of fp8 as bytes.
    values = rows.contiguous().view(torch.float8_e4m3fn) if rows.dtype == torch.uint8 else rows
    if values.dtype != wanted:
        limit = torch.finfo(wanted).max
        values = values.float().clamp(-limit, limit).to(wanted)
    return _digest_bytes(values)


observed._digest = _digest_values
