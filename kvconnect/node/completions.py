"""The body of a completion request, read with suspicion, and the bodies of its answers.

Pure: dictionaries in, values out. It owns the HTTP error format and knows nothing of sockets or engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnect.node.request import Output

MAX_REQUEST_ID_CHARACTERS = 512
DEFAULT_MAX_TOKENS = 16


class BadRequest(Exception):
    """The client must change its request. The text names the field."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class CompletionBody:
    """A checked request body."""

    prompt_token_ids: list[int]
    max_tokens: int
    stream: bool
    kv_transfer_params: dict[str, Any] | None
    return_kv_block_ids: bool


def parse_completion(body: object, *, model: str, vocab_size: int) -> CompletionBody:
    """Check a decoded JSON body.

    Raises:
        BadRequest: a field has a wrong type or value, or asks for what the node does not do.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a JSON {_kind(body)}, it must be an object")
    if "model" in body and body["model"] != model:
        raise BadRequest(f"model {body['model']!r} is not served here, this is {model!r}", status=404)
    _refuse_unsupported(body)
    _integer(body, "min_tokens", 0, least=0)
    _boolean(body, "ignore_eos")
    _boolean(body, "return_token_ids")
    params = body.get("kv_transfer_params")
    if params is not None and not isinstance(params, dict):
        raise BadRequest(f"kv_transfer_params is a JSON {_kind(params)}, it must be an object")
    return CompletionBody(
        prompt_token_ids=_prompt(body.get("prompt"), vocab_size),
        max_tokens=_integer(body, "max_tokens", DEFAULT_MAX_TOKENS, least=1),
        stream=_boolean(body, "stream"),
        kv_transfer_params=params,
        return_kv_block_ids=_boolean(body, "return_kv_block_ids"),
    )


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    temperature = body.get("temperature")
    if temperature is not None and (isinstance(temperature, bool) or temperature != 0):
        raise BadRequest(
            f"temperature is {temperature!r}: this node decodes greedily only, leave it out or 0"
        )
    for name in ("n", "best_of"):
        if _integer(body, name, 1, least=1) != 1:
            raise BadRequest(f"{name} is {body[name]}: this node gives one choice per request")
    for name in ("echo", "logprobs", "stop", "suffix"):
        if body.get(name) not in (None, False, "", []):
            raise BadRequest(f"{name} is not supported by this node, leave it out")


def _prompt(prompt: object, vocab_size: int) -> list[int]:
    if prompt is None:
        raise BadRequest("prompt is missing")
    if isinstance(prompt, str):
        try:
            prompt = list(prompt.encode())
        except UnicodeEncodeError as error:
            raise BadRequest(f"prompt is not valid Unicode: {error}") from error
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list):
        raise BadRequest(f"prompt is a JSON {_kind(prompt)}, it must be a list of token ids or a string")
    if not prompt:
        raise BadRequest("prompt is empty, it must have at least one token")
    for index, token in enumerate(prompt):
        if type(token) is not int or not 0 <= token < vocab_size:
            found = token if type(token) is int else f"a JSON {_kind(token)}"
            raise BadRequest(f"prompt[{index}] is {found}, token ids are integers from 0 to {vocab_size - 1}")
    return prompt


def _integer(body: Mapping[str, Any], name: str, default: int, *, least: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least:
        found = value if type(value) is int else f"a JSON {_kind(value)}"
        raise BadRequest(f"{name} is {found}, it must be an integer of at least {least}")
    return value


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} is a JSON {_kind(value)}, it must be true or false")
    return bool(value)


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {dict: "object", list: "array", str: "string", int: "number", float: "number"}
    return kinds.get(type(value), type(value).__name__)


def check_request_id(request_id: str) -> str:
    """A client's request id.

    Raises:
        BadRequest: it is empty, too long, or has characters that do not belong in logs.
    """
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARACTERS or not request_id.isprintable():
        raise BadRequest(
            f"X-Request-Id must be 1 to {MAX_REQUEST_ID_CHARACTERS} printable characters, "
            f"it has {len(request_id)}"
        )
    return request_id


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    """The body of every error answer."""
    return {"error": {"message": message, "type": kind, "code": status}}


def render(token_ids: Sequence[int]) -> str:
    """Tokens as text: the ids, each after a space, so that parts can be joined."""
    return "".join(f" {token}" for token in token_ids)


@dataclass(frozen=True)
class Answer:
    """What all bodies of one answer have in common."""

    request_id: str
    model: str
    created_s: int
    num_prompt_tokens: int
    return_kv_block_ids: bool

    def body(
        self,
        token_ids: Sequence[int],
        draft_token_ids: Sequence[int] | None,
        last: Output,
        num_generated: int,
    ) -> dict[str, Any]:
        """A whole answer, or the last chunk of a streamed one."""
        body = self.chunk(token_ids, draft_token_ids, last.finish_reason)
        body["usage"] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": self.num_prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        }
        body["kv_transfer_params"] = last.kv_transfer_params
        if self.return_kv_block_ids:
            body["kv_block_ids"] = last.kv_block_ids
        return body

    def chunk(
        self,
        token_ids: Sequence[int],
        draft_token_ids: Sequence[int] | None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        """One chunk of a streamed answer. ``draft_token_ids`` is absent for a model without a draft."""
        body: dict[str, Any] = {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": [
                {
                    "index": 0,
                    "text": render(token_ids),
                    "token_ids": list(token_ids),
                    "logprobs": None,
                    "finish_reason": finish_reason,
                }
            ],
        }
        if draft_token_ids is not None:
            body["draft_token_ids"] = list(draft_token_ids)
        return body
