"""A running node and the time that its prompts take to their first token."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.returning.model import PromptModel
from benchmarks.returning.options import BLOCK_TOKENS, Options
from benchmarks.transfer.cases import Layout
from kvconnect.errors import KVConnectError
from kvconnect.node.engine import NodeEngine
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.request import Output, Request
from kvconnect.node.serving import build_engine

LAYOUT = Layout("nhd", BLOCK_TOKENS)
_NAP_S = 0.002


@dataclass(frozen=True)
class First:
    """The first token of a prompt, the seconds until it was there, and the tokens not computed for it."""

    seconds: float
    token: int
    cached_tokens: int


class Node:
    """A node over ``model`` in a ``with`` block. With ``disk`` it keeps blocks in host memory and there."""

    def __init__(self, options: Options, model: PromptModel, disk: Path | None) -> None:
        self._timeout_s = options.timeout_s
        self._names = (f"prompt-{number}" for number in itertools.count())
        made = NodeOptions(
            device=options.device,
            num_blocks=options.num_blocks,
            block_size=BLOCK_TOKENS,
            max_model_len=options.used_tokens + BLOCK_TOKENS,
            max_num_seqs=1,
            max_num_batched_tokens=options.batched_tokens,
            kv_transfer_config=None if disk is None else _offload(options, disk),
        )
        self.engine: NodeEngine = build_engine(made, model=model)
        model.attach(self.engine.runner.cache)

    def __enter__(self) -> Node:
        self.engine.start()
        # What is on disk from before is known then.
        self.settle()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def first_token(self, prompt: Sequence[int]) -> First:
        """Ask for one token.

        Raises:
            KVConnectError: there was none in time.
        """
        there, outputs = threading.Event(), []

        def take(output: Output) -> None:
            outputs.append((time.perf_counter(), output))
            there.set()

        asked = time.perf_counter()
        self.engine.submit(Request(next(self._names), list(prompt), 1, take))
        if not there.wait(self._timeout_s):
            raise KVConnectError(f"there was no first token within {self._timeout_s:g} s")
        at, output = outputs[0]
        if output.failure is not None:
            raise KVConnectError(f"a prompt failed: {output.failure.message}")
        return First(at - asked, output.token_ids[0], output.cached_tokens)

    def settle(self) -> None:
        """Wait until everything that is to be kept has been written.

        Raises:
            KVConnectError: that took too long.
        """
        state = self.engine.offload_state
        deadline = time.monotonic() + self._timeout_s
        while state is not None and any(state()["busy"].values()):
            if time.monotonic() > deadline:
                raise KVConnectError(f"blocks were still being kept after {self._timeout_s:g} s: {state()}")
            time.sleep(_NAP_S)


def _offload(options: Options, disk: Path) -> str:
    offload = {
        "cpu_bytes": options.kept_bytes,
        "disk_path": str(disk),
        "disk_bytes": max(1 << 20, 2 * options.kept_bytes),
        "max_queued_bytes": options.kept_bytes,
        "wait_s": 60.0,
    }
    extra = {"engine": "none", "insecure": True, "offload": offload}
    return json.dumps({"kv_role": "kv_both", "kv_connector_extra_config": extra})
