"""The prompt's part of an answer's usage: how many of its tokens were cached before, and how many were added.

D counts by its own cache, in which it found or fetched everything. The client gets what P counted, whose
answer has it where vLLM runs with ``--enable-prompt-tokens-details``. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_COUNT_KEY = "remote_prefill_cached_tokens"
"""The key of ``kv_transfer_params`` with which vLLM's P names its cached tokens to D."""

_READ, _CREATED, _NEW = "cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens"
"""Keys of a message's usage, which sum up to the prompt's tokens."""
_DETAILS = {"prompt_tokens_details": "created_cache_tokens", "input_tokens_details": "cache_write_tokens"}
"""By key of the details in other answers' usage: the key in there of the tokens that were added."""
_WITHIN = ("message", "response")
"""Where events of messages and of responses have their usage."""
_MARKS = (b'"cached_tokens"', b'"' + _READ.encode() + b'"')


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """Tokens of a prompt that were ``cached`` before, and ``created`` in the cache; None: unknown."""

    cached: int | None
    created: int | None

    @classmethod
    def of(cls, answer: Mapping[str, Any], handed: Mapping[str, Any]) -> PromptCounts:
        """The counts in a prefill node's answer, or in what it handed out."""
        usage = answer.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        cached, created = _count(usage, _READ), _count(usage, _CREATED)
        for key, key_created in _DETAILS.items():
            if isinstance(details := usage.get(key), dict):
                cached, created = _count(details, "cached_tokens"), _count(details, key_created)
        return cls(_count(handed, _COUNT_KEY) if cached is None else cached, created)

    def put_into(self, usage: dict[str, Any]) -> None:
        """Replace the counts that a usage has."""
        for key, key_created in _DETAILS.items():
            details = usage.get(key)
            if isinstance(details, dict):
                own = _count(details, "cached_tokens")
                if own is not None and details.get("cached_tokens_per_turn") == [own]:
                    _put(details, cached_tokens_per_turn=None if self.cached is None else [self.cached])
                _put(details, **{"cached_tokens": self.cached, key_created: self.created})
        prompt = sum(_count(usage, key) or 0 for key in (_READ, _CREATED, _NEW))
        if _count(usage, _READ) is not None and _count(usage, _NEW) is not None:
            _put(usage, **{_READ: self.cached, _CREATED: self.created})
            usage[_NEW] = max(0, prompt - usage[_READ] - (_count(usage, _CREATED) or 0))


def _count(within: Mapping[str, Any], key: str) -> int | None:
    value = within.get(key)
    return value if isinstance(value, int) else None


def _put(within: dict[str, Any], **values: Any) -> None:
    within |= {
        key: value for key, value in values.items() if value is not None and within.get(key) is not None
    }


def has_counts(data: bytes) -> bool:
    """Whether events, or a whole answer, may have counts."""
    return any(mark in data for mark in _MARKS)


def with_counts(data: bytes, counts: PromptCounts) -> bytes:
    """Whole events, or a whole answer, with these counts in place of their own."""
    return b"\n\n".join(_replaced(event, counts) for event in data.split(b"\n\n"))


def _replaced(event: bytes, counts: PromptCounts) -> bytes:
    begin = event.find(b"{")
    if begin < 0 or not has_counts(event):
        return event
    try:
        content = json.loads(event[begin:])
    except (ValueError, RecursionError):
        return event
    for place in (content, *(content.get(key) for key in _WITHIN)):
        usage = place.get("usage") if isinstance(place, dict) else None
        if isinstance(usage, dict):
            counts.put_into(usage)
    return event[:begin] + json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
