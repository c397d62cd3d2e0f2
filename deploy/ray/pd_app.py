"""A prefill/decode application of Ray Serve LLM whose replicas move KV with kvconnect.

    serve run pd_app:build model=Qwen/Qwen3-8B prefill=2 decode=2

Ray Serve LLM needs to know nothing of the connector: it asks a prefill replica first, and passes what its
answer names on to a decode replica. Ports are free ones (``port`` 0), so that replicas may share a host. All
replicas need the same key: on one host they make one, across hosts name its file in ``extra``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ray.serve import Application
from ray.serve.llm import LLMConfig, build_pd_openai_app


def build(arguments: Mapping[str, str]) -> Application:
    """The application, from ``KEY=VALUE`` arguments of ``serve run``.

    ``model``: a name or a folder. ``prefill`` and ``decode``: numbers of replicas. ``extra``,
    ``engine_kwargs`` and ``environment``: JSON objects with more of ``kv_connector_extra_config``, of vLLM's
    arguments and of the replicas' environment. ``module``: the connector's. ``cpu``: 1 without GPUs.
    """
    return build_pd_openai_app(
        {
            "prefill_config": _replicas(arguments, "prefill", "kv_producer"),
            "decode_config": _replicas(arguments, "decode", "kv_consumer"),
        }
    )


def _replicas(arguments: Mapping[str, str], name: str, role: str) -> LLMConfig:
    objects: dict[str, Any] = {
        key: json.loads(arguments.get(key, "{}")) for key in ("extra", "engine_kwargs", "environment")
    }
    transfer = {
        "kv_connector": "KVConnect",
        "kv_connector_module_path": arguments.get("module", "kvconnect.vllm"),
        "kv_role": role,
        "kv_connector_extra_config": {"engine": "nixl", **objects["extra"]},
    }
    hardware: dict[str, Any] = {}
    if arguments.get("cpu") == "1":
        hardware = {
            "accelerator_config": {"kind": "cpu"},
            "placement_group_config": {"bundles": [{"CPU": 1}]},
        }
    return LLMConfig(
        model_loading_config={"model_id": "model", "model_source": arguments["model"]},
        deployment_config={"num_replicas": int(arguments.get(name, "1"))},
        engine_kwargs={**objects["engine_kwargs"], "kv_transfer_config": transfer},
        runtime_env={"env_vars": objects["environment"]},
        **hardware,
    )
