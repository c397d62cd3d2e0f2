"""The body of a completion request, read with suspicion, and the bodies of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvconnect.node.request import Output, Request

MAX_REQUEST_ID_CHARACTERS = 512
DEFAULT_MAX_TOKENS = 16
_ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "n": (1,),
    "best_of": (1,),
    **dict.fromkeys(("echo", "logprobs", "stop", "suffix"), (False, "", [])),
}
"""Of fields that ask for what this node does not do: what does not ask for it. Left out is right for all."""


class BadRequest(Exception):
    """The client must change its request. The text names the field."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class CompletionBody(Struct, kw_only=True):
    """A checked request body. This node decodes greedily, and gives one choice per request."""

    prompt: str | list[int | list[int]]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    session_id: str | None = None
    return_kv_block_ids: bool | None = None
    temperature: float | None = None
    n: int | None = None
    best_of: int | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    echo: Any = None
    logprobs: Any = None
    stop: Any = None
    suffix: Any = None

    def prompt_token_ids(self, vocab_size: int) -> list[int]:
        """The prompt as token ids; those of a text are its bytes.

        Raises ``BadRequest``: there are none, several prompts, or one that the model does not have.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            try:
                prompt = list(prompt.encode())
            except UnicodeEncodeError as error:
                raise BadRequest(f"prompt is not valid Unicode: {error}") from error
        elif len(prompt) == 1 and isinstance(prompt[0], list):
            prompt = list(prompt[0])
        if not prompt:
            raise BadRequest("prompt is empty, it must have at least one token")
        ids = []
        for index, token in enumerate(prompt):
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                found = token if isinstance(token, int) else "an array"
                raise BadRequest(
                    f"prompt[{index}] is {found}, token ids are integers from 0 to {vocab_size - 1}"
                )
            ids.append(token)
        return ids


def parse_completion(body: object, *, model: str, session_id: str | None = None) -> CompletionBody:
    """Check a decoded JSON body, which may name another session than the header did.

    Raises BadRequest: a field is wrong, or asks for what is not done here.
    """
    try:
        parsed = msgspec.convert(body, CompletionBody)
    except ValueError as error:
        raise BadRequest(f"the body cannot be used: {error}") from error
    parsed.session_id = parsed.session_id or session_id
    if parsed.model not in (None, model):
        raise BadRequest(f"model {parsed.model!r} is not served here, this is {model!r}", status=404)
    for name, accepted in _ACCEPTED.items():
        value = getattr(parsed, name)
        if value is not None and value not in accepted:
            shown = value if isinstance(value, (int, float)) else str(value)[:80]
            raise BadRequest(f"{name} is {shown!r}, which is not supported by this node: leave it out")
    return parsed


def check_request_id(request_id: str) -> str:
    """A client's request id. Raises BadRequest: empty, too long, or with characters logs must not have."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARACTERS or not request_id.isprintable():
        raise BadRequest(
            f"X-Request-Id must be 1 to {MAX_REQUEST_ID_CHARACTERS} printable characters, "
            f"it has {len(request_id)}"
        )
    return request_id


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    """The body of every error answer."""
    return {"error": {"message": message, "type": kind, "code": status}}


class CompletionAnswer(Struct, frozen=True):
    """What all bodies of one answer have in common."""

    request_id: str
    model: str
    created_s: int
    return_kv_block_ids: bool

    def body(
        self, request: Request, token_ids: Sequence[int], drafts: Sequence[int] | None, output: Output
    ) -> dict[str, Any]:
        """A whole answer or a chunk of a streamed one; what ends it has the counts.

        ``drafts`` are None for a model without a draft.
        """
        choice = {
            "index": 0,
            "text": "".join(f" {token}" for token in token_ids),
            "token_ids": list(token_ids),
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }
        body: dict[str, Any] = {
            "id": f"cmpl-{self.request_id}",
            "object": "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": [choice],
        }
        if drafts is not None:
            body["draft_token_ids"] = list(drafts)
        if output.is_last:
            num_prompt, num_generated = len(request.prompt_token_ids), request.num_generated_tokens
            body["usage"] = {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_generated,
                "total_tokens": num_prompt + num_generated,
                "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
            }
            body["kv_transfer_params"] = output.kv_transfer_params
            if self.return_kv_block_ids:
                body["kv_block_ids"] = output.kv_block_ids
        return body
