"""What a client is told of its request: new tokens, and how it ended. Plain values, made by the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """Why a request ended without its tokens. ``status`` is an HTTP status code."""

    status: int
    message: str
    kind: str


@dataclass(frozen=True)
class Output:
    """News of a request: new tokens, and its end if ``finish_reason`` or ``failure`` is set.

    ``draft_token_ids`` are the draft model's proposals, None for a model without one.
    ``kv_block_ids`` are the request's logical blocks by group when it ended.
    """

    token_ids: tuple[int, ...] = ()
    draft_token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    kv_block_ids: tuple[list[int], ...] | None = None
    cached_tokens: int = 0

    @property
    def is_last(self) -> bool:
        """Nothing follows."""
        return self.finish_reason is not None or self.failure is not None
