"""A logits processor of vLLM that makes D sample, as its first token, the token that P sampled.

A router that streamed P's token to the client names it as ``first_token`` of ``kv_transfer_params``. D
computes the prompt's last token all the same, so that seeds, penalties, grammars and logprobs go on as if D
had sampled the token. vLLM makes the class once in every worker of every server that has kvconnect
installed; a request without the key costs nothing.

vLLM has two model runners with one interface each. The class implements both.
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
    # Before 0.32 runner 2 takes no logits processors from plugins.
    ProcessorOfRunner2 = LogitsProcessor

_BASES = tuple(dict.fromkeys((LogitsProcessor, ProcessorOfRunner2)))


def _named(params: SamplingParams) -> Any:
    """What a request names as the first token of its output; None where it names none."""
    transfer = (params.extra_args or {}).get("kv_transfer_params")
    return transfer.get(FIRST_TOKEN_KEY) if isinstance(transfer, Mapping) else None


class FirstToken(*_BASES):  # type: ignore[misc]
    """For a request that names its first token, masks all other tokens until it has output."""

    def __init__(self, vllm_config: Any, *of_runner: Any) -> None:
        """``of_runner`` is (device, is_pin_memory) of runner 1, or (request states,) of runner 2."""
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        # Runner 1: batch row -> (token, output so far). Runner 2: slot of the request states -> token.
        self._rows: dict[int, tuple[int, Sequence[int]]] = {}
        self._slots: dict[int, int] = {}
        self._state = of_runner[0] if len(of_runner) == 1 else None

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raises ``ValueError`` if ``first_token`` is not a token id."""
        token = _named(params)
        if token is not None and (not isinstance(token, int) or isinstance(token, bool) or token < 0):
            raise ValueError(
                f"kv_transfer_params.{FIRST_TOKEN_KEY} is {token!r}; accepted: the id of a token"
            )

    def is_argmax_invariant(self) -> bool:
        """False: the mask changes greedy sampling too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Runner 1: requests were added, removed or moved to other rows."""
        process_dict_updates(self._rows, batch_update, self._new_row)

    def _new_row(
        self, params: SamplingParams, _prompt: Sequence[int] | None, output: Sequence[int]
    ) -> tuple[int, Sequence[int]] | None:
        token = self._checked(params)
        return None if token is None or output else (token, output)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Runner 2: a request got this slot. Whether it names its first token."""
        self._slots.pop(req_idx, None)
        if (token := self._checked(sampling_params)) is None:
            return False
        self._slots[req_idx] = token
        return True

    def _checked(self, params: SamplingParams) -> int | None:
        # ``validate_params`` knows no vocabulary.
        token = _named(params)
        return token if isinstance(token, int) and 0 <= token < self._vocabulary else None

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Mask ``logits`` (rows, vocabulary) in rows of requests without output, over any earlier mask."""
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
        """Masks all rows of a request: without output it has one, also under speculative decoding.

        Rows are chosen by masks, since only the device knows which they are, and no step may wait for it.
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
