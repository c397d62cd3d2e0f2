"""D samples as its first token the one that P sampled, and that the client has: a logits processor of vLLM.

A router that streamed P's token names it as ``first_token`` of ``kv_transfer_params``. D computes the
prompt's last token as ever, so that seeds, penalties, grammars and logprobs go on as if it had sampled this
token itself. vLLM makes the class once in every worker of every server that kvconnect is installed beside; a
request without that key costs nothing.

vLLM has two model runners with an interface each: the class has both, as their loaders ask for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from kvconnect.config import FIRST_TOKEN_KEY

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as ProcessorOfRunner2
except ImportError:
    # Before 0.32 the second runner takes no logits processors of others.
    ProcessorOfRunner2 = LogitsProcessor

_BASES = tuple(dict.fromkeys((LogitsProcessor, ProcessorOfRunner2)))


def first_token_of(params: SamplingParams) -> int | None:
    """The token that a request's output begins with; None where none is named."""
    transfer = (params.extra_args or {}).get("kv_transfer_params")
    token = transfer.get(FIRST_TOKEN_KEY) if isinstance(transfer, Mapping) else None
    return token if isinstance(token, int) and not isinstance(token, bool) else None


class FirstToken(*_BASES):  # type: ignore[misc]
    """Leaves a request that names its first token no other one."""

    def __init__(self, vllm_config: Any, *of_runner: Any) -> None:
        """``of_runner`` is a device and whether memory is pinned, or the state of requests of runner 2."""
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        # Runner 1: by row of the batch, with the output so far. Runner 2: by slot of its state.
        self._rows: dict[int, tuple[int, Sequence[int]]] = {}
        self._slots: dict[int, int] = {}
        self._state = of_runner[0] if len(of_runner) == 1 else None

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raises ``ValueError``: the first token is none."""
        transfer = (params.extra_args or {}).get("kv_transfer_params")
        if isinstance(transfer, Mapping) and (given := transfer.get(FIRST_TOKEN_KEY)) is not None:
            token = first_token_of(params)
            if token is None or token < 0:
                raise ValueError(
                    f"kv_transfer_params.{FIRST_TOKEN_KEY} is {given!r}; accepted: the id of a token"
                )

    def is_argmax_invariant(self) -> bool:
        """Greedy sampling depends on it."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Runner 1: requests came, went, or changed their rows."""
        process_dict_updates(self._rows, batch_update, self._new_row)

    def _new_row(
        self, params: SamplingParams, _prompt: Sequence[int] | None, output: Sequence[int]
    ) -> tuple[int, Sequence[int]] | None:
        token = self._checked(params)
        return None if token is None or output else (token, output)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Runner 2: a request has this slot now."""
        self._slots.pop(req_idx, None)
        if (token := self._checked(sampling_params)) is None:
            return False
        self._slots[req_idx] = token
        return True

    def _checked(self, params: SamplingParams) -> int | None:
        token = first_token_of(params)
        return token if token is not None and 0 <= token < self._vocabulary else None

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Exclude all others in the rows of requests that have no output yet, whatever masks came before."""
        if ctx is not None:
            self._apply_to_slots(logits, ctx)
            return logits
        for row, (token, output) in [*self._rows.items()]:
            if output:
                del self._rows[row]
            else:
                logits[row].fill_(-math.inf)
                logits[row, token] = 0.0
        return logits

    def _apply_to_slots(self, logits: torch.Tensor, ctx: Any) -> None:
        """Of a request all rows: without output it has one, also under speculative decoding.

        By masks: which rows these are is known on the device alone, and nothing waits for it.
        """
        if not self._slots:
            return
        assert self._state is not None
        for slot, seen in zip(
            ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False
        ):
            if (token := self._slots.get(slot)) is None:
                continue
            prompt = int(self._state.prompt_len.np[slot])
            if seen == prompt:
                rows = ctx.expanded_idx_mapping == slot
                logits.masked_fill_(rows[:, None], -math.inf)
                logits[:, token].masked_fill_(rows, 0.0)
            elif seen > prompt:
                del self._slots[slot]
