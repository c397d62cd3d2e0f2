"""KV under no false name, over real vLLM servers: another prompt's handle, other weights, replaced ones."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

import safetensors.torch
import torch

from kvconnect.node.children import BadAnswer
from tests.vllm.servers import OBSERVED, Server, random_prompt, running, transfer_config
from tests.vllm.tiny_models import Recipe, write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.full, pytest.mark.servers]
QUICK = {"peer_timeout_s": 4}
REPLACED = {"VLLM_SERVER_DEV_MODE": "1"}


def fine_tuned(recipe, folder):
    """The same model with a little noise on every matrix, in a folder of the same name."""
    other = folder / "other" / recipe.folder.name
    shutil.copytree(recipe.folder, other)
    torch.manual_seed(7)
    for path in other.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(path)
        for name, tensor in tensors.items():
            if tensor.dim() > 1:
                tensors[name] = tensor + torch.randn_like(tensor) * tensor.std() * 0.2
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    return Recipe(recipe.kind, other, recipe.options)


def failures(server, reason):
    return server.metrics(reason=reason).get("vllm:kvconnect_failures_total", 0)


def replace(server, folder):
    """Other weights in place, and every cache forgotten, as vLLM's API has it."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    server.fetch("/collective_rpc", body)
    reset(server)


def reset(server):
    """vLLM forgets its own blocks only while none is in use: those that were held are let go by a step."""
    for _ in range(20):
        if json.loads(server.fetch("/reset_prefix_cache?reset_external=true", {}))["success"]:
            return
        server.tokens([1, 2, 3], max_tokens=2)
        time.sleep(0.2)
    raise AssertionError(f"caches cannot be reset\n{server.logs()}")


def test_two_fine_tunes_under_one_name_and_weights_that_are_replaced(tmp_path):
    recipe = write_model("gqa", tmp_path)
    other = fine_tuned(recipe, tmp_path)
    kept = {"cpu_bytes": 64 << 20, "disk_path": str(tmp_path / "disk"), "disk_bytes": 1 << 30}

    def server(made, name, role, cpu, **more):
        config = transfer_config(role, "nixl", OBSERVED, **QUICK, **more)
        return Server(made, tmp_path, name, cpu, config, environment=REPLACED)

    prefill = server(recipe, "prefill", "producer", "0", offload=kept)
    decode = server(recipe, "decode", "consumer", "1")
    foreign = server(other, "foreign", "consumer", "1", kv_load_failure_policy="recompute")

    def loads(to):
        return len(to.observed("load"))

    with running(prefill, decode, foreign):
        names = [re.findall(r"weights: (.*)", one.log.read_text())[0] for one in (prefill, decode, foreign)]
        assert names[0] == names[1] != names[2]
        prompt = random_prompt(300, 1)
        params = prefill.prefilled(prompt)
        assert decode.tokens(prompt, kv_transfer_params=params) == prefill.local_tokens(prompt)
        assert loads(decode) == 1
        # Two fine-tunes: computed, and counted.
        prompt = random_prompt(300, 2)
        answer = foreign.tokens(prompt, kv_transfer_params=prefill.prefilled(prompt))
        assert answer == foreign.local_tokens(prompt)
        assert loads(foreign) == 0
        assert failures(foreign, "other_weights") == 1
        # Replaced on the prefill server alone, with something held.
        held = random_prompt(300, 3)
        stale = prefill.prefilled(held)
        before = prefill.local_tokens(held)
        replace(prefill, other.folder)
        assert prefill.local_tokens(held) == foreign.local_tokens(held) != before
        for params in (stale, prefill.prefilled(held)):
            with pytest.raises(BadAnswer, match="answered 500"):
                decode.tokens(held, kv_transfer_params=params)
        assert loads(decode) == 1
        assert failures(decode, "other_weights") == 2
        # And on the decode server too: they hand over again, the new weights' KV.
        replace(decode, other.folder)
        prompt = random_prompt(300, 4)
        assert decode.local_tokens(prompt) == foreign.local_tokens(prompt)
        assert decode.from_prefill(prefill, prompt) == foreign.local_tokens(prompt)
        assert loads(decode) == 2
        # A reset without other weights is no reason not to.
        reset(prefill)
        prompt = random_prompt(300, 5)
        decode.from_prefill(prefill, prompt)
        assert loads(decode) == 3
        # On disk the blocks of one are not the other's.
        folders = [json.loads(path.read_text()) for path in (tmp_path / "disk").glob("*/*.json")]
        assert len({str(folder) for folder in folders}) >= 2
