"""The models that a node can serve, by name."""

from __future__ import annotations

import torch

from kvconnect.errors import ConfigError
from kvconnect.node.models.base import Dims, Model
from kvconnect.node.models.grouped import GroupedModel, SlidingModel
from kvconnect.node.models.hybrid import HybridModel
from kvconnect.node.models.latent import LatentModel, MixedModel
from kvconnect.node.models.parts import WeightSource
from kvconnect.node.models.wide import WideModel

MODELS: dict[str, type[GroupedModel] | type[LatentModel] | type[HybridModel] | type[WideModel]] = {
    "gqa": GroupedModel,
    "mla": LatentModel,
    "mixed": MixedModel,
    "sliding": SlidingModel,
    "hybrid": HybridModel,
    "wide": WideModel,
}


def build_model(name: str, *, seed: int = 0, device: torch.device | str = "cpu") -> Model:
    """A model with weights drawn from its name and ``seed``.

    Raises:
        ConfigError: there is no such model; the text lists those there are.
    """
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is unknown; choose one of {', '.join(sorted(MODELS))}")
    return MODELS[name](WeightSource(name, seed, torch.device(device)), Dims())
