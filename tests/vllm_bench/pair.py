"""The engines of a bench: for prefill and decode, or one alone with offload. They serve many seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.vllm_bench.engine import Engine
from tests.vllm_bench.links import Links
from tests.vllm_bench.model import MODELS, Model

CAPACITY = 160
KINDS = ("pd", "offload")
EXTRA = {
    "engine": "memory",
    "insecure": True,
    "lease_s": 60.0,
    "lease_max_s": 120.0,
    "peer_timeout_s": 4.0,
    "slot_bytes": 4096,
    "stream_min_tokens": 48,
}
_LAYOUTS = (("LBNHC", "LBNHC"), ("LBHNC", "BLNHC"))


@dataclass(frozen=True)
class Setup:
    """What engines a seed runs on. Seeds of one set-up share them."""

    kind: str
    model: Model
    layouts: tuple[str, str]
    cpu_bytes: int = 0

    @classmethod
    def of_seed(cls, kind: str, seed: int) -> Setup:
        """Every kind of cache comes round, with either layout, with offload and without."""
        names = tuple(MODELS)
        if kind == "offload":
            # Without a prefix cache vLLM hands off no states, and offload refuses the model.
            names = tuple(name for name in names if MODELS[name].caches_prefixes)
        rest, index = divmod(seed, len(names))
        model = MODELS[names[index]]
        layouts = _LAYOUTS[rest % len(_LAYOUTS)]
        blocks = (0, 48, 400)[(rest // 2) % 3] if kind == "pd" else (32, 96, 800)[(rest // 2) % 3]
        if blocks and not model.caches_prefixes:
            blocks = 0
        page_bytes = sum(group.page_bytes * group.num_layers for group in model.groups)
        return cls(kind, model, layouts, blocks * page_bytes)


class Engines:
    """The engines of a set-up. The side channel and the threads of their workers are real."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.links = Links()
        extra: dict[str, Any] = dict(EXTRA)
        if setup.cpu_bytes:
            # Parking goes by the clock, and a seed must run the same every time: the simulator has it.
            extra["offload"] = {"cpu_bytes": setup.cpu_bytes, "checkpoint_tokens": 32, "park_after_s": 3600}
        names = (("prefill", "kv_producer"), ("decode", "kv_consumer"))
        if setup.kind == "offload":
            extra, names = {"engine": "none", "offload": extra["offload"]}, (("alone", "kv_both"),)
        self.all = tuple(
            Engine(
                name, setup.model, role=role, capacity=CAPACITY, layout=layout, extra=extra, links=self.links
            )
            for (name, role), layout in zip(names, setup.layouts, strict=False)
        )

    def close(self) -> None:
        for engine in self.all:
            engine.close()
