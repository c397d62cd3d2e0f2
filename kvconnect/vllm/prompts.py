"""What vLLM's requests have besides tokens that their KV depends on. Imports no vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvconnect.scheduler.prompts import digest_prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request


def prompt_digest(request: Request, num_tokens: int) -> bytes | None:
    """The digest of a request's first tokens, and of what vLLM tells equal blocks apart by.

    Made of the same for every version of vLLM, which writes its own hashes in a way of its own. None for what
    vLLM submits, and aborts, in place of a request whose client left or that was refused before it came here:
    it has the parameters of that one, so that they can be given back, and a prompt of one token.
    """
    if getattr(request, "abort_immediately", False):
        return None
    return digest_prompt(request.all_token_ids[:num_tokens], _keys(request, num_tokens))


def _keys(request: Request, num_tokens: int) -> Iterator[tuple[str | int | bytes, ...]]:
    lora = request.lora_request
    if lora is not None:
        yield "lora", lora.lora_name, lora.lora_path
    if request.cache_salt:
        yield "salt", request.cache_salt
    for feature in request.mm_features or ():
        if feature.mm_position.offset < num_tokens:
            yield "mm", feature.identifier, feature.mm_position.offset, feature.mm_position.length
    if request.prompt_embeds is not None:
        embeds = request.prompt_embeds[:num_tokens].contiguous().cpu()
        yield "embeds", str(embeds.dtype), hashlib.sha256(embeds.view(torch.uint8).numpy()).digest()
