"""Sleep mode: where it is allowed, by which name it is refused elsewhere, and where our memory lies."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from kvconnect.config import parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.vllm.settings import outside_pools, refuse_unsupported

SLEEPS = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="cumem")
OFFLOAD = {"engine": "none", "offload": {"cpu_bytes": 1 << 20}}
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def refuse(monkeypatch, model=SLEEPS, *, tells=True, **extra):
    """As a vLLM of 0.33 has it, or an older one."""
    hooks = {"unregister_kv_caches": None} if tells else {}
    base = SimpleNamespace(KVConnectorBase_V1=type("Base", (), hooks))
    monkeypatch.setitem(sys.modules, BASE, base)
    monkeypatch.setattr("kvconnect.vllm.settings.check_blocks", lambda *_: None)
    monkeypatch.setattr("kvconnect.vllm.settings.hash_block_tokens", lambda *_: None)
    vllm_config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(),
        speculative_config=None,
    )
    given = {"kv_role": "kv_both", "kv_connector_extra_config": extra}
    refuse_unsupported(vllm_config, None, parse_kv_transfer_config(given))


@pytest.mark.parametrize("extra", [{}, OFFLOAD])
def test_a_server_may_sleep(monkeypatch, extra):
    refuse(monkeypatch, **extra)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tells": False}, r"tells no connector when it sleeps; accepted: vLLM 0\.33 or newer"),
        (
            {"model": SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="criu")},
            "sleep_mode_backend 'criu' does not leave slots.*accepted: cumem",
        ),
    ],
)
def test_a_vllm_that_tells_nothing_or_takes_slots_is_refused_by_name(monkeypatch, changes, why):
    with pytest.raises(ConfigError, match=f"enable_sleep_mode is on, but .*{why}.*turn it off"):
        refuse(monkeypatch, **changes)


def test_without_sleep_mode_nothing_is_refused(monkeypatch):
    refuse(monkeypatch, SimpleNamespace(enable_sleep_mode=False), tells=False)


@pytest.mark.parametrize("sleeps", [True, False])
def test_what_is_ours_is_allocated_where_no_pool_of_the_caller_is_open(sleeps):
    """PyTorch's pools are of one thread."""
    config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
    thread = outside_pools(config, threading.get_ident, torch.device("cpu"))
    assert (thread != threading.get_ident()) is sleeps


def test_an_error_of_what_is_made_there_is_the_caller_s():
    def make():
        raise ConfigError("no room")

    with pytest.raises(ConfigError, match="no room"):
        outside_pools(SimpleNamespace(model_config=SLEEPS), make, torch.device("cpu"))


def test_vllm_s_hooks_are_the_worker_s():
    pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")
    from kvconnect.vllm.connector import KVConnect

    called = []
    connector = KVConnect.__new__(KVConnect)
    transfer = SimpleNamespace(sleep=lambda: called.append("sleep"), wake=lambda: called.append("wake"))
    connector._worker = SimpleNamespace(transfer=transfer)
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert called == ["sleep", "wake"]
    connector._worker.transfer = None
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert KVConnect.supports_sleep_mode(None)
