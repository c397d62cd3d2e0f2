from __future__ import annotations

from tests.vllm.conftest import forked_servers

__all__ = ["forked_servers"]
