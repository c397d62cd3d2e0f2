"""KV that is asked of other servers by name, under the vLLM that is installed."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvconnect.addresses import RankAddress
from kvconnect.cache.identity import Naming
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import parse_kv_transfer_config
from kvconnect.halves.building import build_scheduler_half
from kvconnect.outcome import Cause
from kvconnect.transfer.orders import Found, Results
from kvconnect.transfer.stack import StackTraits
from kvconnect.vllm.metadata import PEER_SOURCE, ReportMetadata
from kvconnect.vllm.offload import BlockNames, naming
from kvconnect.vllm.settings import usable_naming
from tests.halves.test_scheduler_half import ATTENTION
from tests.vllm_contract import test_scheduler_hooks as hooks_kit
from tests.vllm_contract.test_offload_facts import attention, cache_of, ring
from tests.vllm_contract.test_requests import adapter

ALGORITHM = "sha256_cbor"
SOURCES = {"sources": ["10.0.0.9:5600"], "engine": "memory"}


def vllm_config(algorithm=ALGORITHM):
    return SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm, enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        parallel_config=SimpleNamespace(),
    )


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    init_none_hash(get_hash_fn_by_name(ALGORITHM))


def hashed(name, num_tokens, tokens=16, **more):
    """A request of vLLM, hashed in blocks of so many tokens."""
    hasher = get_request_block_hasher(tokens, get_hash_fn_by_name(ALGORITHM))
    sampling = SamplingParams(max_tokens=8)
    return Request(name, list(range(num_tokens)), sampling, None, block_hasher=hasher, **more)


def test_servers_name_kv_alike_if_algorithm_and_seed_are_the_same(monkeypatch):
    cache = cache_of(attention(32), hash_block_size=16)
    ours = naming(vllm_config(), cache)
    assert ours.tokens == 16
    assert naming(vllm_config(), cache_of(attention(64), hash_block_size=64)).hashing == ours.hashing
    assert naming(vllm_config("sha256"), cache).hashing != ours.hashing
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert naming(vllm_config(), cache).hashing != ours.hashing


def test_without_a_seed_only_what_begins_alike_in_all_processes_has_names(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED")
    cache = cache_of(attention(16), hash_block_size=16)
    assert kv_cache_utils.DEFAULT_NONE_HASH_SEED in naming(vllm_config(), cache).hashing
    assert naming(vllm_config("xxhash"), cache) is None


def test_a_cache_of_which_a_part_is_replayed_has_no_names():
    assert naming(vllm_config(), cache_of(attention(16), ring(8), hash_block_size=8)) is None


def config_of(**extra):
    given = {"kv_role": "kv_both", "engine_id": "D", "kv_connector_extra_config": {**SOURCES, **extra}}
    return parse_kv_transfer_config(given)


@pytest.mark.parametrize("sources", [[], SOURCES["sources"]])
def test_an_operator_hears_once_what_to_set(caplog, sources):
    config = config_of(sources=sources)
    with caplog.at_level(logging.WARNING):
        assert usable_naming(vllm_config(), config, None) is None
    assert ("Set PYTHONHASHSEED" in caplog.text) is bool(sources)
    whole = vllm_config()
    whole.scheduler_config.enable_chunked_prefill = whole.cache_config.enable_prefix_caching = False
    assert usable_naming(whole, config, Naming("s", 16)) is None
    assert usable_naming(vllm_config(), config, Naming("s", 16)) == Naming("s", 16)


@pytest.mark.parametrize("tokens", [16, 32, 48])
@pytest.mark.parametrize("salt", [None, "s"])
def test_names_of_another_length_are_those_that_vllm_has_with_such_blocks(tokens, salt):
    names = BlockNames(vllm_config(), 16)
    ours = hashed("a", 200, cache_salt=salt)
    before = list(ours.block_hashes)
    assert list(names(ours, tokens)) == hashed("b", 200, tokens, cache_salt=salt).block_hashes
    assert len(names(ours, tokens)) == 200 // tokens
    assert ours.block_hashes == before
    assert names(hashed("other", 200, cache_salt="t"), tokens) != names(ours, tokens)


def test_what_an_adapter_computed_has_no_name_for_others():
    assert not BlockNames(vllm_config(), 16)(hashed("a", 100, lora_request=adapter()), 16)


def server():
    """A connector with a source, and its scheduler half."""
    clock = SimpleNamespace(now=10.0)
    half = build_scheduler_half(
        config_of(),
        KVCacheConfig(1000, (ATTENTION,)),
        StackTraits(clock=lambda: clock.now, naming=Naming("s", 16), names=BlockNames(vllm_config(), 16)),
        directory=(RankAddress(0, "10.0.0.1", 5600),),
    )
    made = hooks_kit.connector(half, "memory")
    return made, clock


def ordered(made):
    output = SimpleNamespace(total_num_scheduled_tokens=0, preempted_req_ids=None)
    return made.build_connector_meta(output).orders


@pytest.mark.parametrize("fails", [False, True])
def test_vllm_asks_again_until_the_source_has_answered_and_then_loads_once(fails):
    made, _ = server()
    request = hashed("a", 100)
    made.on_new_request(request)
    assert made.get_num_new_matched_tokens(request, 0) == (None, False)
    (find,) = ordered(made).finds
    assert find.prefix.names == tuple(request.block_hashes)
    assert made.get_num_new_matched_tokens(request, 0) == (None, False)
    meta = ReportMetadata(Results(found=(Found("a", 64),)))
    made.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))
    assert made.get_num_new_matched_tokens(request, 0) == (64, True)
    assert made.get_loaded_kv_cache_group_ids(request) == hooks_kit.MOVED
    if PEER_SOURCE is not None:
        assert made.get_external_cache_hit_sources(request, 64) == {PEER_SOURCE: 64}
    blocks = SimpleNamespace(get_block_ids=lambda: ([*range(1, 8)],))
    made.update_state_after_alloc(request, blocks, 64)
    (load,) = ordered(made).loads
    assert (load.num_tokens, load.prefix.names) == (64, find.prefix.names)
    failed = {"a"} if fails else None
    made.update_connector_output(KVConnectorOutput(finished_recving={"a"}, failed_recving=failed))
    # vLLM computes a request whose load failed.
    assert not fails or made.get_num_new_matched_tokens(request, 0) == (0, False)
    assert ordered(made).pulls == ((("failed", 0) if fails else ("loaded", 64)),)


def test_a_source_that_is_silent_does_not_keep_vllm_waiting():
    made, clock = server()
    request = hashed("a", 100)
    made.on_new_request(request)
    assert made.get_num_new_matched_tokens(request, 0) == (None, False)
    clock.now += 0.6
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)


def test_what_a_worker_found_is_reported_with_the_step_and_joined_with_other_ranks():
    made, _ = server()
    found = (Found("a", 16),)
    made._worker = SimpleNamespace(results=lambda: Results(found=found))
    made.get_transfer_results(set())
    report = made.build_connector_worker_meta()
    assert report.results == Results(found=found)
    assert made.build_connector_worker_meta() is None
    assert ReportMetadata().aggregate(report) == report


def test_why_a_load_failed_reaches_the_scheduler_half_with_the_step_in_which_vllm_reports_it():
    made, _ = server()
    why = Cause.EVICTED("it was evicted")
    made._worker = SimpleNamespace(results=lambda: Results(received=("a",), failed={"a": why}))
    made.get_transfer_results(set())
    report = made.build_connector_worker_meta()
    assert report.results == Results(failed={"a": why})
    reported = []
    made._half.update_results = reported.append
    # Another rank has not reported the request yet.
    made.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    made.update_connector_output(KVConnectorOutput(finished_recving={"a"}, failed_recving={"a"}))
    assert [results.failed for results in reported] == [{}, {"a": why}]
    assert not made._reasons
