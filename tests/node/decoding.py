"""A node whose decode steps are run by the decoder of the benchmarks."""

from __future__ import annotations

import torch

from benchmarks.node.decode import Decoder
from kvconnect.node.engine import Runner, by_request


def padded_sizes(max_num_seqs):
    """Powers of two up to the most requests that run at once, which is the last size."""
    sizes = [1 << power for power in range(max_num_seqs.bit_length()) if 1 << power < max_num_seqs]
    return [*sizes, max_num_seqs]


class DecodingRunner(Runner):
    """Takes a runner's place: ``decoder`` runs the steps that only decode and fit, ``num_runs`` of them."""

    def __init__(self, runner, sizes, *, captured):
        super().__init__(runner.model, runner.cache)
        self.decoder = Decoder(runner.model, runner.cache, sizes=sizes, captured=captured)
        self.num_runs = 0

    @torch.inference_mode()
    def execute(self, step):
        chunks = step.chunks
        if len(chunks) > self.decoder.sizes[-1] or any(
            len(chunk.token_ids) > 1 or not chunk.samples for chunk in chunks
        ):
            return super().execute(step)
        self.num_runs += 1
        return by_request([chunk.request_id for chunk in chunks], self.decoder.run(step))


def decode_with(client, sizes, *, captured=False):
    """Have a client's decode steps run so. Returns its new runner."""
    client.engine.runner = DecodingRunner(client.engine.runner, sizes, captured=captured)
    return client.engine.runner
