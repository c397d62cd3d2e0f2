"""What SGLang's KV depends on, entry by entry of ``cache.identity.ENTRIES``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvconnect.cache.identity import Identity
from kvconnect.runner_kit.checkpoint_files import local_name
from kvconnect.runner_kit.model_configuration import configuration


def read_identity(
    model: Any, server_args: Any, kv_args: Any, dtype: torch.dtype, ranks: int, convert_dtype: bool
) -> Identity:
    """The identity of a server's KV: of ``ModelConfig``, its arguments and its pools.

    ``dtype``: of the cache. ``ranks``: their number where a pool travels only between equal ones, else 0.
    """
    architectures = getattr(model.hf_config, "architectures", None) or ["unknown"]
    draft = getattr(server_args, "speculative_draft_model_path", None)
    return Identity.of(
        {
            "model": f"SGLang {'+'.join(architectures)}",
            "configuration": configuration(model.hf_config),
            "settings": {
                "page-size": int(kv_args.page_size),
                "rows beside the KV": [int(size) for size in kv_args.aux_item_lens],
                "states": [str(getattr(kind, "value", kind)) for kind in kv_args.state_types],
                "layout": str(getattr(kv_args, "kv_layout", None)),
            },
            "quantization": str(getattr(model, "quantization", None)),
            "dtype": str(model.dtype),
            "cache dtype": "any of 16 and 8 bits, by convert_dtype" if convert_dtype else str(dtype),
            "ranks": ranks,
            "weights": _weights(model, server_args),
            "draft": {} if not draft else {"": local_name(draft, None) or str(draft)},
        }
    )


def _weights(model: Any, server_args: Any) -> Mapping[str, str]:
    if str(getattr(server_args, "load_format", "auto")) == "dummy":
        return {"files": f"made up, seed {getattr(server_args, 'random_seed', None)}"}
    source, revision = str(model.model_path), getattr(model, "revision", None)
    # Without files here, the name that both servers were given.
    return {"files": local_name(source, revision) or f"{source} {revision}"}
