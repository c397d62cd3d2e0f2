"""A request that P computes step by step, on a ``Pair``. What is not computed yet is noise."""

from __future__ import annotations

import torch

from kvconnect.cache.specs import div_ceil
from kvconnect.outcome import Cause
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Hold, Orders, Progress, Withdraw
from tests.transfer.pair import BLOCK_TOKENS, HEADS, LAYERS, Pair


class Prefill:
    """One request of ``num_tokens`` in these blocks, expected under ``handle``."""

    def __init__(
        self, pair: Pair, source: tuple[int, ...], num_tokens: int, handle: str = "handle-a"
    ) -> None:
        self.pair, self.source, self.num_tokens, self.handle = pair, source, num_tokens, handle
        self.truth = torch.randn(LAYERS, len(source), BLOCK_TOKENS, HEADS, 8).to(torch.float16)
        self.computed = self.told = 0
        self.order(expected=(handle,))

    def order(self, ready=lambda: True, **orders) -> None:
        self.pair.prefill.order(Orders(**orders), ready)

    def compute(self, stop: int) -> None:
        """Write the KV of the tokens before ``stop``."""
        for token in range(self.computed, stop):
            block, row = divmod(token, BLOCK_TOKENS)
            self.pair.prefill.storage[:, self.source[block], row] = self.truth[:, block, row]
        self.computed = max(self.computed, stop)

    def news(self, stop: int) -> Progress:
        """What is new with the tokens before ``stop``."""
        blocks = div_ceil(stop, BLOCK_TOKENS)
        ids = self.source[self.told : blocks]
        groups = (GroupBlocks(0, self.told, ids),) if ids else ()
        self.told = max(self.told, blocks)
        return Progress(self.handle, self.num_tokens, stop, groups)

    def to(self, stop: int, ready=lambda: True) -> None:
        """Compute so far, and say so."""
        self.compute(stop)
        self.order(ready, progress=(self.news(stop),))

    def noise(self) -> None:
        """Somebody else has the blocks now."""
        self.pair.prefill.storage[:, list(self.source)] = torch.randn(
            LAYERS, len(self.source), BLOCK_TOKENS, HEADS, 8
        ).to(torch.float16)

    def lose(self, source: tuple[int, ...]) -> None:
        """The request is preempted, and will be computed in other blocks."""
        self.noise()
        self.order(preempted=(self.handle,))
        self.source, self.computed, self.told = source, 0, 0

    def withdraw(self, reason: str = "the prefill was aborted") -> None:
        self.order(withdrawn=(Withdraw(self.handle, Cause.PREFILL_ENDED(reason)),))

    def hold(self, request: str = "a", ready=lambda: True, **changes) -> None:
        """The last token is computed, and the request held."""
        self.compute(self.num_tokens)
        fields = {
            "request_id": request,
            "handle": self.handle,
            "num_tokens": self.num_tokens,
            "groups": (GroupBlocks(0, 0, self.source),),
            "step": 0,
        }
        self.order(ready, holds=(Hold(**{**fields, **changes}),))

    def landed(self, target: tuple[int, ...]) -> bool:
        """Whether every token is where D wants it."""
        got = self.pair.decode.storage[:, list(target)]
        tokens = torch.arange(len(self.source) * BLOCK_TOKENS).reshape(-1, BLOCK_TOKENS) < self.num_tokens
        return torch.equal(got[:, tokens], self.truth[:, tokens])
