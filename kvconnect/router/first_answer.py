"""Joins P's first token and D's stream into one stream for the client, and tells an empty stream.

P's answer has one token, which the client gets at once as the beginning of the stream. D is given that token
and samples no other; D's stream continues behind it, without the part that the client has. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvconnect.router.bodies import WholeEvents, at
from kvconnect.router.endpoints import SPLIT, Endpoint

_SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "ignore_eos"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    *("spaces_between_special_tokens", "response_format", "structured_outputs", "logprobs"),
}
_ANY = {"model", "stream", "stream_options", "max_tokens", "n", "user", "priority", "cache_salt", "echo"}
_TRIED = {
    "/v1/completions": {*_SAMPLING, *_ANY, "prompt", "best_of", "add_special_tokens"},
    "/v1/chat/completions": {
        *(*_SAMPLING, *_ANY, "messages", "max_completion_tokens", "top_logprobs"),
        *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    },
}
"""By path: body keys with which the joined stream was tested to equal a single server's."""
_OBJECT, _CHAT_OBJECT = "text_completion", "chat.completion.chunk"
_NO_IDS = {"prompt_token_ids": None, "token_ids": None}
_END = b"data: [DONE]\n\n"


class Differs(Exception):
    """D's stream does not begin with the token that the client has."""


def is_eligible(path: str, body: Mapping[str, Any]) -> bool:
    """Whether the first token of an answer may be P's. Decided before P is asked."""
    tried = _TRIED.get(path)
    options = body.get("stream_options")
    return (
        tried is not None
        and body.keys() <= tried
        and not body.get("echo")
        and not SPLIT[path].is_several(body)
        and (options is None or (isinstance(options, dict) and options.keys() <= {"include_usage"}))
    )


def is_one_token(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    """Whether P's answer is complete for the client: one token of one answer."""
    limit = endpoint.limit_of(body)
    return limit == 1 and not isinstance(limit, bool) and not endpoint.is_several(body)


@dataclass(frozen=True)
class FirstAnswer:
    """The part of P's answer for the client. ``sent`` are its events, the whole answer if ``is_whole``.

    Otherwise ``token`` is the first token, ``text`` its text, and ``created`` the answer's Unix time.
    """

    sent: bytes
    is_whole: bool
    token: int = -1
    text: str = ""
    created: int = 0


def read_first(answer: Mapping[str, Any], body: Mapping[str, Any]) -> FirstAnswer | None:
    """The part of P's answer that a streaming client gets; None if the whole answer must come from D.

    D's answer is needed if the token's text cannot stand alone: it is empty or a part of a character, may
    begin a string of the body's ``stop``, or the server's parser put it elsewhere than into ``content``.
    """
    try:
        (choice,) = answer["choices"]
        (token,) = choice["token_ids"]
    except (KeyError, TypeError, ValueError):
        return None
    message, finish, created = choice.get("message"), choice.get("finish_reason"), answer.get("created")
    text = choice.get("text") if message is None else _content_of(message)
    if not isinstance(token, int) or not isinstance(created, int) or not isinstance(text, str):
        return None
    head = {"id": answer.get("id"), "object": _OBJECT, "created": created, "model": answer.get("model")}
    ends = {"finish_reason": None, "stop_reason": None}
    if finish != "length":
        ends = {"finish_reason": finish, "stop_reason": choice.get("stop_reason")}
    elif not text or "\ufffd" in text or any(_may_become(text, stop) for stop in _strings(body.get("stop"))):
        return None
    events = []
    if message is None:
        shown = {"index": 0, "text": text, "logprobs": choice.get("logprobs"), **ends, **_NO_IDS}
    else:
        head["object"] = _CHAT_OBJECT
        role = {"role": message.get("role", "assistant"), "content": ""}
        begun = {"index": 0, "delta": role, "logprobs": None, "finish_reason": None}
        events.append({**head, "choices": [begun], "prompt_token_ids": None})
        if finish == "length":
            # In a chat stream only the last chunk has this key.
            del ends["stop_reason"]
        logprobs = choice.get("logprobs")
        shown = {"index": 0, "delta": {"content": text}, "logprobs": logprobs, **ends, "token_ids": None}
    events.append({**head, "choices": [shown]})
    if finish == "length":
        return FirstAnswer(b"".join(map(_event, events)), False, token, text, created)
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**head, "choices": [], "usage": answer.get("usage")})
    if answer.get("system_fingerprint") is not None:
        # A server sends it with its last event.
        events[-1]["system_fingerprint"] = answer["system_fingerprint"]
    return FirstAnswer(b"".join(map(_event, events)) + _END, is_whole=True)


def is_of_whole_prompt(answer: Mapping[str, Any], handed: Mapping[str, Any]) -> bool:
    """Whether P computed the whole prompt, by the parameters that it ``handed`` out."""
    counted = at(answer, "usage", "prompt_tokens")
    return counted is not None and handed.get("remote_num_tokens") == counted


def _content_of(message: object) -> str | None:
    """The text of a chat message; None if the message has any other content."""
    if not isinstance(message, dict) or any(message.get(key) for key in message.keys() - {"content", "role"}):
        return None
    content = message.get("content")
    return content if isinstance(content, str) else None


def _strings(stops: object) -> Iterator[str]:
    for stop in [stops] if isinstance(stops, str) else stops if isinstance(stops, list) else ():
        if isinstance(stop, str):
            yield stop


def _may_become(text: str, stop: str) -> bool:
    """Whether the text ends with the beginning of a stop string."""
    return any(text.endswith(stop[:length]) for length in range(1, len(stop)))


def _event(chunk: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk, separators=(',', ':'), ensure_ascii=False)}\n\n".encode()


def error_end(message: str) -> bytes:
    """The end of a stream that cannot continue, as vLLM sends it: an error event, then the end."""
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return _event({"error": error}) + _END


def has_no_output(raw: bytes) -> bool:
    """Whether a stream up to here has no token: no events but the role of a chat, counts, and the end."""
    *events, rest = raw.split(b"\n\n")
    return not rest and all(map(_is_without_output, events))


def _is_without_output(event: bytes) -> bool:
    if event == _END.rstrip():
        return True
    try:
        chunk = json.loads(event.removeprefix(b"data:"))
    except (ValueError, RecursionError):
        return False
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    return isinstance(choices, list) and not any(map(_has_output, choices))


def _has_output(choice: object) -> bool:
    if not isinstance(choice, dict):
        return True
    delta = choice.get("delta")
    shown = {**choice, **(delta if isinstance(delta, dict) else {})}
    return any(shown.get(key) for key in shown.keys() - {"index", "delta", "role", "prompt_token_ids"})


class RestOfStream:
    """D's stream without the parts sent from P's answer: role, the first token's text and logprobs."""

    def __init__(self, first: FirstAnswer, *, has_logprobs: bool) -> None:
        self._left = first.text
        self._logprobs = int(has_logprobs)
        self._created = first.created
        self._replaced: tuple[bytes, bytes] | None = None
        self._events = WholeEvents(is_stream=True)

    @property
    def is_over(self) -> bool:
        """Whether all parts that the client has are removed: further bytes pass unchanged."""
        return not self._left and not self._logprobs

    def take(self, data: bytes) -> bytes:
        """The client's part of more bytes of D's stream; empty ``data`` is its end. Raises ``Differs``."""
        whole = self._events.take(data, is_end=not data)
        if not self.is_over:
            whole = b"".join(map(self._rest_of, whole.split(b"\n\n")[:-1]))
        # With P's ``created``. A text cannot match: quotes within it are escaped.
        return whole.replace(*self._replaced) if self._replaced else whole

    def _rest_of(self, block: bytes) -> bytes:
        whole = block + b"\n\n"
        if self.is_over or not block.startswith(b"data:"):
            return whole
        try:
            chunk = json.loads(block[5:])
            (choice,) = chunk["choices"]
        except (ValueError, TypeError, KeyError):
            # The end event, an event without choices, or an error: the client gets each of them.
            return whole
        created = chunk.get("created")
        if self._created and isinstance(created, int) and created != self._created:
            self._replaced = (f'"created":{created}'.encode(), f'"created":{self._created}'.encode())
        text = self._cut(choice)
        logprobs = self._cut_logprobs(choice)
        if not text and not logprobs and choice.get("finish_reason") is None:
            return b""
        return _event(chunk)

    def _cut(self, choice: dict[str, Any]) -> str:
        """Remove the text that was sent. Returns the rest."""
        where, key = (choice["delta"], "content") if "delta" in choice else (choice, "text")
        text = where.get(key) or ""
        if text.startswith(self._left):
            text, self._left = text[len(self._left) :], ""
        elif self._left.startswith(text):
            # The server holds back text that may become a stop string.
            text, self._left = "", self._left[len(text) :]
        else:
            raise Differs(f"it begins with {text[:32]!r}")
        if where.get(key):
            where[key] = text
        return text

    def _cut_logprobs(self, choice: dict[str, Any]) -> bool:
        """Remove the first entries of log probabilities. Returns whether any are left."""
        logprobs = choice.get("logprobs")
        if not isinstance(logprobs, dict):
            return False
        columns = [key for key, column in logprobs.items() if isinstance(column, list)]
        count = max((len(logprobs[key]) for key in columns), default=0)
        cut, self._logprobs = min(count, self._logprobs), self._logprobs - min(count, self._logprobs)
        for key in columns:
            logprobs[key] = logprobs[key][cut:]
        return count > cut
