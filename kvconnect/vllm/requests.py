"""What vLLM's requests are to us: made of one or not, what their KV depends on, how prompts are shortened.

vLLM calls the request for prompt ``i`` of a completion ``cmpl-NAME-i-RANDOM``, with any NAME that a client
chose, and makes children ``0_ID``, ``1_ID`` and so on of a request that is to be answered several times.
Imports no vLLM.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.peer.handles import digest_prompt
from kvconnect.vllm.adapters import Adapters

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Ids that a client had a part in begin with letters of vLLM's own.
_CHILD = re.compile(r"\A[0-9]+_(?=.)", re.DOTALL)
_PROMPT_OF_BATCH = re.compile(r"(?:[0-9]+_)?(cmpl-.*)-([0-9]{1,9})-[0-9a-f]{8}", re.DOTALL)


def parent_of(request_id: str) -> str:
    """The request that a child was made of; a request that is none is its own."""
    return _CHILD.sub("", request_id)


def batch_of(request_id: str) -> tuple[str, int]:
    """What the prompts of one completion have in common, and the number of this one; else no name.

    One answer to all of them carries the parameters that the first ends with.
    """
    found = _PROMPT_OF_BATCH.fullmatch(request_id)
    return (found[1], int(found[2])) if found else ("", 0)


def introduce(half: SchedulerHalf, request: Request, *, names_adapters: bool = True) -> None:
    """Make a new request known to the scheduler half.

    Unless it ``names_adapters`` by their contents nothing is kept that was computed with one.
    """
    # With prompt log probabilities vLLM computes the whole prompt anew, even where some could be loaded.
    reads, writes = not request.get_skip_reading_prefix_cache(), not getattr(request, "resumable", False)
    is_told = names_adapters or getattr(request, "lora_request", None) is None
    half.new_request(request, reads=reads and is_told, writes=writes and is_told)


def shorten(request: Request, excess: int) -> None:
    """Cut the last ``excess`` tokens off a prompt that has not been scheduled yet, and compute no more."""
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        if (prompt := getattr(request, name, None)) is not None:
            setattr(request, name, prompt[:-excess])
    # In place: vLLM hands out read-only views of this list.
    del request._all_token_ids[-excess:]
    request.num_prompt_tokens -= excess
    request.max_tokens = 1


def prompt_digest(request: Request, num_tokens: int, adapters: Adapters) -> bytes | None:
    """The digest of a request's first tokens, and of what vLLM distinguishes equal blocks by.

    The same for every version of vLLM, which each hash otherwise. None for what vLLM submits, and aborts, in
    place of a request that ended before it came here: it has its parameters, and a prompt of one token.
    """
    if getattr(request, "abort_immediately", False):
        return None
    return digest_prompt(request.all_token_ids[:num_tokens], _keys(request, num_tokens, adapters))


def _keys(request: Request, num_tokens: int, adapters: Adapters) -> Iterator[tuple[str | int | bytes, ...]]:
    lora = request.lora_request
    if lora is not None:
        yield "lora", adapters.digest(lora)
    if request.cache_salt:
        yield "salt", request.cache_salt
    for feature in request.mm_features or ():
        if feature.mm_position.offset < num_tokens:
            yield "mm", feature.identifier, feature.mm_position.offset, feature.mm_position.length
    if request.prompt_embeds is not None:
        embeds = request.prompt_embeds[:num_tokens].contiguous().cpu()
        yield "embeds", str(embeds.dtype), hashlib.sha256(embeds.view(torch.uint8).numpy()).digest()
