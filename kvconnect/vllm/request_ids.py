"""What vLLM's request ids say: which requests were made of one, and whose parameters reach a router.

vLLM calls the request for prompt ``i`` of a completion ``cmpl-NAME-i-RANDOM``, whatever NAME a client chose,
and makes children ``0_ID``, ``1_ID`` and so on of a request that is to be answered several times.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvconnect.scheduler.params import TRANSFER_KEY, transfer_params

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Ids that a client had a part in begin with letters of vLLM's own.
_CHILD = re.compile(r"[0-9]+_(.+)", re.DOTALL)
_LATER_PROMPT = re.compile(r"(?:[0-9]+_)?cmpl-.*-[1-9][0-9]*-[0-9a-f]{8}", re.DOTALL)


def parent_of(request_id: str) -> str:
    """The request that a child was made of; a request that is none is its own."""
    child = _CHILD.fullmatch(request_id)
    return request_id if child is None else child[1]


def reaches_router(request: Request) -> bool:
    """Whether the parameters that this request ends with can reach a router.

    One answer to a batch of prompts carries those of the first prompt; a stream has an end for each. What a
    router gave a transfer id it can name without them.
    """
    if _LATER_PROMPT.fullmatch(request.request_id) is None:
        return True
    kind = getattr(getattr(request.sampling_params, "output_kind", None), "name", "")
    return kind != "FINAL_ONLY" or transfer_params(request).get(TRANSFER_KEY) is not None
