"""The paths that the router serves, as vLLM 0.32 and 0.33 have them, and which requests are split. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconnect.node.http_server import BadRequest, parse_json
from kvconnect.router.bodies import PARAMS, at

_ANSWERS = ("n", "best_of")
_OF_A_CLIENT = ("session_id", "kv_hints", "kvconnect_receipt")
_TOKENS = "prompt_token_ids"


@dataclass(frozen=True)
class Endpoint:
    """How the body of a request to one path names what the router reads and sets.

    ``limits``: the keys of the most tokens to generate; P's body always has the first of them. ``sampling``:
    the key of the object that has the sampling parameters, limits included; empty where the body itself has
    them. ``at_prefill``: values that P's body always has. ``text``: the key of a prompt that nodes tokenise,
    and in whose place they take its tokens; empty without one.
    """

    limits: tuple[str, ...] = ("max_tokens",)
    sampling: str = ""
    at_prefill: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def parse(self, raw: bytes) -> dict[str, Any]:
        """A client's body as a dictionary. Of its ``kv_transfer_params`` only hints and the like are kept.

        A client must not name engines, addresses or blocks: a decode node gets only parameters that a prefill
        node returned.

        Raises:
            BadRequest: not JSON, not an object, or sampling parameters that are none.
        """
        body = parse_json(raw)
        params = body.pop(PARAMS, None)
        kept = {key: params[key] for key in _OF_A_CLIENT if key in params} if isinstance(params, dict) else {}
        if kept:
            body[PARAMS] = kept
        sampling = self.sampling_of(body)
        if not isinstance(sampling, dict):
            raise BadRequest(f"{self.sampling} must be a JSON object, not {type(sampling).__name__}")
        # vLLM passes on what a client put there in place of the body's own.
        if isinstance(more := sampling.get("extra_args"), dict):
            more.pop(PARAMS, None)
        return body

    def sampling_of(self, body: Mapping[str, Any]) -> Any:
        """The object that has the sampling parameters."""
        return body.get(self.sampling, {}) if self.sampling else body

    def limit_of(self, body: Mapping[str, Any]) -> Any:
        """The most tokens to generate that a client names; None without."""
        sampling = self.sampling_of(body)
        named = [sampling[key] for key in reversed(self.limits) if sampling.get(key) is not None]
        return named[0] if named else None

    def is_batch(self, body: Mapping[str, Any]) -> bool:
        """Whether the body has several prompts."""
        prompt = body.get("prompt")
        return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], (str, list))

    def is_several(self, body: Mapping[str, Any]) -> bool:
        """Whether a node makes several requests of the body: several prompts or several answers."""
        counts = (self.sampling_of(body).get(key) for key in _ANSWERS)
        return self.is_batch(body) or any(
            isinstance(count, int) and not isinstance(count, bool) and count > 1 for count in counts
        )

    def is_notice(self, body: Mapping[str, Any]) -> bool:
        """Whether a request only announces its prompt: a hint asks to prefetch what is kept of it."""
        hinted = (at(holder, "kv_hints", "actions") for holder in (body, body.get(PARAMS)))
        actions = [action for found in hinted if isinstance(found, list) for action in found]
        return any(
            at(action, "action_type") == "prefetch" and at(action, "payload", "of") == "prompt"
            for action in actions
        )

    def direct_reason(self, body: Mapping[str, Any]) -> tuple[str, str] | None:
        """Why one node has to serve a request, as (metrics label, text); None if two can share it.

        Log probabilities of the prompt are known only to the node that prefills; ``echo`` asks vLLM for them,
        in a chat always and in a completion with ``logprobs``, 0 included.
        """
        sampling = self.sampling_of(body)
        asks_logprobs = any(
            sampling.get(key) is not None for key in ("prompt_logprobs", "prompt_logprob_token_ids")
        )
        if body.get("use_beam_search") is True:
            return "beam_search", "it asks for a beam search"
        if asks_logprobs or (body.get("echo") is True and ("messages" in body or has_logprobs(body))):
            return "prompt_logprobs", "log probabilities of the prompt are asked for"
        if self.limit_of(body) == 0:
            return "no_tokens", "it asks for no tokens"
        if body.get("previous_response_id") is not None:
            return "previous_response", "the response before it is stored at one node"
        return None

    def is_text(self, body: Mapping[str, Any]) -> bool:
        """Whether a decode node would tokenise the prompt again, and can be spared that."""
        prompt = body.get(self.text) if self.text else None
        # A chat with an echo is rendered from its messages.
        return isinstance(prompt, str if self.text == "prompt" else list) and not body.get("echo")

    def tokens_of(self, answer: Mapping[str, Any]) -> list[int] | None:
        """The prompt's tokens in the answer of a prefill node that was asked for them; None without."""
        tokens = at(answer, *(("choices", 0) if self.text == "prompt" else ()), _TOKENS)
        is_usable = isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens)
        return tokens if is_usable else None

    def decode_body(
        self, body: Mapping[str, Any], params: Mapping[str, Any] | None, tokens: list[int] | None = None
    ) -> dict[str, Any]:
        """The body for a decode node: the client's, with the parameters that the prefill node handed out.

        ``tokens``, where they are known, spare the decode node to tokenise the prompt.
        """
        sent = dict(body)
        if tokens is not None and self.text == "prompt":
            sent["prompt"] = tokens
        elif tokens is not None:
            # vLLM takes them from there, and leaves them to no connector.
            params = {**(params or {}), _TOKENS: tokens}
        return sent if params is None else {**sent, PARAMS: {**body.get(PARAMS, {}), **params}}

    def prefill_body(self, body: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """The body for a prefill node: one answer of one token, not streamed. ``params`` keep its KV."""
        given = self.sampling_of(body)
        sampling = {key: value for key, value in given.items() if key not in ("min_tokens", *_ANSWERS)}
        sampling |= {key: 1 for key in self.limits if key in sampling or key == self.limits[0]}
        sent = {**body, self.sampling: sampling} if self.sampling else sampling
        sent.pop("stream_options", None)
        return {**sent, **self.at_prefill, "stream": False, PARAMS: {**body.get(PARAMS, {}), **params}}


def has_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether a client asks for log probabilities of the answer; 0 of a completion asks for them too."""
    logprobs = body.get("logprobs")
    return logprobs is not None and logprobs is not False


SPLIT: Mapping[str, Endpoint] = {
    "/v1/completions": Endpoint(text="prompt"),
    "/v1/chat/completions": Endpoint(("max_tokens", "max_completion_tokens"), text="messages"),
    "/v1/responses": Endpoint(("max_output_tokens",), at_prefill={"background": False, "store": False}),
    "/v1/messages": Endpoint(),
    "/cohere/v2/chat": Endpoint(),
    "/inference/v1/generate": Endpoint(sampling="sampling_params"),
}
"""Generating requests, whose answers name what P holds: split over P and D."""

SGLANG: Mapping[str, Endpoint] = {
    path: SPLIT.get(path, Endpoint()) for path in ("/generate", "/v1/completions", "/v1/chat/completions")
}
"""The same of SGLang's servers, both of which get the client's body."""

ALONE = ("/v1/chat/completions/batch", "/invocations", "/v1/audio/transcriptions", "/v1/audio/translations")
"""Generating requests whose answers do not name it: one decode node serves each, which is counted."""

STORED = (("GET", "/v1/responses/{response_id}"), ("POST", "/v1/responses/{response_id}/cancel"))
"""Method and path of requests about a response that one decode node stores."""

PASSED = (
    *(("GET", path) for path in ("/v1/models", "/version", "/load", "/ping", "/tokenizer_info")),
    *(
        ("POST", path)
        for path in (
            *("/ping", "/tokenize", "/detokenize", "/v1/messages/count_tokens"),
            *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/generative_scoring"),
            *("/v1/systemone", "/v1/decisions"),
            *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
            *("/v1/completions/render", "/v1/chat/completions/render", "/v1/responses/render"),
            *("/v1/messages/render", "/cohere/v2/chat/render"),
            *("/v1/completions/derender", "/v1/chat/completions/derender"),
        )
    ),
)
"""Method and path of what computes no KV that another node would need. A decode node answers.

Of vLLM's other paths none is served: they control one server (sleep, caches, adapters, profiles, weights).
"""
