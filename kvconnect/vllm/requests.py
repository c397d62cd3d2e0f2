"""What is done to a request of vLLM when it arrives. Imports no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconnect.offload.composite import SchedulerComposite

if TYPE_CHECKING:
    from vllm.v1.request import Request


def introduce(half: SchedulerComposite, request: Request) -> None:
    """Make a new request known to the scheduler half."""
    # With prompt log probabilities vLLM computes the whole prompt anew, whatever could be loaded.
    reads, writes = not request.get_skip_reading_prefix_cache(), not getattr(request, "resumable", False)
    half.new_request(request, reads=reads, writes=writes)


def shorten(request: Request, excess: int) -> None:
    """Cut the last ``excess`` tokens off a prompt that has not been scheduled yet, and compute no more."""
    if request.prompt_token_ids is not None:
        request.prompt_token_ids = request.prompt_token_ids[:-excess]
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-excess]
    if getattr(request, "prompt_is_token_ids", None) is not None:
        request.prompt_is_token_ids = request.prompt_is_token_ids[:-excess]
    # In place: vLLM hands out read-only views of this list.
    del request._all_token_ids[-excess:]
    request.num_prompt_tokens -= excess
    request.max_tokens = 1
