"""What this backend expects of SGLang, held against the SGLang that is installed; no server is started."""

from __future__ import annotations

import inspect
import socket
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here; make test-sglang")

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base import conn as base
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.plugins import load_plugins

from kvconnect.errors import ConfigError
from kvconnect.halves.building import Trust
from kvconnect.node.children import answers, fetch_json
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.handles import Handles
from kvconnect.sglang import conn, room_ledger
from kvconnect.sglang.bootstrap_server import KVConnectBootstrapServer
from kvconnect.sglang.prefill_directory import KEY, PrefillDirectory
from kvconnect.sglang.rank_pools import RankShape, read_pools
from kvconnect.sglang.registration import _check_arguments
from kvconnect.transfer.attached_rows import AttachedRows
from tests.ports import free_port
from tests.sglang_contract.linked_cache import LINKED
from tests.sglang_contract.ranks import until

PAGE, TOKENS = 4, 64


@pytest.fixture(scope="module", autouse=True)
def plugins():
    load_plugins()


def test_states_have_sglangs_numbers():
    poll = base.KVPoll
    theirs = [poll.Failed, poll.Bootstrapping, poll.WaitingForInput, poll.Transferring, poll.Success]
    names = ("FAILED", "BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS")
    assert [getattr(room_ledger, name) for name in names] == theirs


def test_the_backend_is_found_by_its_name_and_warm_up_keeps_its_own_classes():
    backend, kinds = utils.TransferBackend("kvconnect"), utils.KVClassType
    assert backend.value == "kvconnect"
    assert backend is utils.TransferBackend["KVCONNECT"]
    assert backend in list(utils.TransferBackend)
    expected = {
        kinds.MANAGER: conn.KVConnectManager,
        kinds.SENDER: conn.KVConnectSender,
        kinds.RECEIVER: conn.KVConnectReceiver,
        kinds.BOOTSTRAP_SERVER: KVConnectBootstrapServer,
        kinds.KVARGS: base.KVArgs,
    }
    assert {kind: utils.get_kv_class(backend, kind) for kind in kinds} == expected
    from sglang.srt.disaggregation import decode, prefill

    assert prefill.get_kv_class(backend, kinds.SENDER) is decode.get_kv_class(backend, kinds.SENDER)
    fake = utils.get_kv_class(utils.TransferBackend.FAKE, kinds.SENDER)
    assert fake.__module__.startswith("sglang.")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (conn.KVConnectManager, base.BaseKVManager),
        (conn.KVConnectSender, base.BaseKVSender),
        (conn.KVConnectReceiver, base.BaseKVReceiver),
        (KVConnectBootstrapServer, base.BaseKVBootstrapServer),
    ],
)
def test_every_method_takes_what_sglang_may_give(ours, theirs):
    assert not ours.__abstractmethods__
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if name.startswith("__") and name != "__init__":
            continue
        given = inspect.signature(method).parameters
        taken = inspect.signature(getattr(ours, name)).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        assert takes_any or not set(given) - set(taken), name


def arguments(pool, states=None, draft=None):
    """What SGLang's queues make of a pool."""
    args = base.KVArgs()
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = pool.get_contiguous_buf_infos()
    args.num_draft_entries = 0
    if draft is not None:
        infos = draft.get_contiguous_buf_infos()
        args.num_draft_entries = len(infos[0])
        for name, more in zip(("kv_data_ptrs", "kv_data_lens", "kv_item_lens"), infos, strict=True):
            setattr(args, name, [*getattr(args, name), *more])
    args.kv_layer_ids = utils.build_kv_layer_ids(
        token_to_kv_pool=pool,
        draft_token_to_kv_pool=draft,
        num_draft_entries=args.num_draft_entries,
        num_hidden_layers=3,
    )
    args.page_size = pool.page_size
    utils.setup_state_kv_args(args, pool, draft, 3, req_to_token_pool=states)
    return args


def mha(layers=3, heads=2, **more):
    given = {"size": TOKENS, "page_size": PAGE, "dtype": torch.float32, "head_dim": 8, "device": "cpu"}
    return MHATokenToKVPool(
        **given, head_num=heads, layer_num=layers, enable_memory_saver=False, enable_alt_stream=False, **more
    )


def test_pools_of_keys_and_values_and_their_drafts():
    pool, draft = mha(), mha(layers=1)
    made = read_pools(arguments(pool, draft=draft), RankShape(2, num_layers=3, dtype=torch.float32))
    names = [f"layers.{layer}.{plane}" for plane in "kv" for layer in range(3)]
    assert list(made.cache.tensors) == [*names, "layers.3.k", "layers.3.v"]
    assert made.draft_from == 3
    assert made.streams
    for name, buffer in zip(names, [*pool.k_buffer, *pool.v_buffer], strict=True):
        ours = made.cache.tensors[name].tensor
        assert ours.shape == (TOKENS // PAGE + 1, PAGE, 2, 8)
        buffer[PAGE * 3 + 1] = 5.0
        assert (ours[3, 1] == 5.0).all()
    assert made.cache.config.num_blocks == TOKENS // PAGE + 1


def test_latent_pools():
    pool = MLATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 16, 8, 3, "cpu", False)
    made = read_pools(arguments(pool), RankShape(None, num_layers=3, dtype=torch.bfloat16))
    assert list(made.cache.tensors) == [f"layers.{layer}.latent" for layer in range(3)]
    pool.kv_buffer[1][PAGE * 2 + 3] = 7.0
    assert (made.cache.tensors["layers.1.latent"].tensor[2, 3] == 7.0).all()


def test_windows_have_a_pool_of_their_own():
    pool = SWAKVPool(TOKENS, 16, PAGE, torch.float32, 2, 8, [0, 2], [1], "cpu", enable_alt_stream=False)
    args = arguments(pool)
    assert [str(kind.value) for kind in args.state_types] == ["swa"]
    made = read_pools(args, RankShape(2, num_layers=3, dtype=torch.float32))
    assert made.states == (False,)
    assert not made.streams, "SGLang names a window's pages with the last part"
    full, window = made.cache.config.groups
    assert full.num_blocks == TOKENS // PAGE + 1
    assert window.num_blocks == 16 // PAGE + 1
    assert len(window.layer_names) == 4


def test_recurrent_states_have_a_slot_for_each_request():
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=32,
        n_groups=1,
        num_heads=4,
        head_dim=8,
        state_size=16,
        conv_kernel=4,
    )
    requests = HybridReqToTokenPool(
        size=4,
        mamba_size=6,
        mamba_spec_state_size=4,
        max_context_len=TOKENS,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=False,
    )
    pool = HybridLinearKVPool(
        TOKENS, torch.float32, PAGE, 2, 8, [1, 3], device="cpu", mamba_pool=requests.mamba_pool
    )
    made = read_pools(arguments(pool, requests), RankShape(2, num_layers=4, dtype=torch.float32))
    attention, states = made.cache.config.groups
    assert attention.layer_names == ("layers.1.k", "layers.3.k", "layers.1.v", "layers.3.v")
    assert len(states.layer_names) == 4
    assert states.num_blocks == 7
    assert made.streams, "states are sent last"
    assert made.cut_by_rank
    assert requests.mamba_allocator.alloc(6).min() > 0, "slot 0 is no request's, as block 0 here"


def test_other_state_components_are_refused_by_name():
    args = arguments(mha())
    utils.append_state_component(args, base.StateType.SWA_RING, [1], [8], [8])
    with pytest.raises(ConfigError, match="swa_ring"):
        read_pools(args, RankShape(2, dtype=torch.float32))


def test_the_rows_beside_a_prompts_kv_travel_in_one_piece():
    both = [utils.MetadataBuffers(4, 16, torch.float32, 32000) for _ in range(2)]
    rows = []
    for buffers in both:
        addresses, _, sizes = buffers.get_buf_infos()
        rows.append(AttachedRows(addresses, sizes))
    source, target = both
    source.output_ids[2, 0], source.bootstrap_room[2, 0] = 4711, 2**62 + 1
    assert rows[1].write(3, rows[0].read(2))
    assert target.output_ids[3, 0].item() == 4711
    assert target.bootstrap_room[3, 0].item() == 2**62 + 1
    assert not target.output_ids[:3].any()
    assert not rows[1].write(3, b"short")
    with pytest.raises(ConfigError, match="65536"):
        AttachedRows([1], [65537])


BACKEND = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "kvconnect"}
LINKER = {
    "enable_unified_cache_external_linker": True,
    "unified_cache_external_linker_backend": "dynamic",
    "unified_cache_external_linker_config": LINKED,
}
KEPT = '{"offload": {"cpu_bytes": 1000000}}'


@pytest.mark.parametrize(
    ("given", "config", "texts"),
    [
        (BACKEND, "", ["KVCONNECT_CONFIG is not set"]),
        (BACKEND, "{", ["is not JSON"]),
        (BACKEND, '{"engin": "nixl"}', ["did you mean 'engine'"]),
        (BACKEND, '{"engine": "none"}', ["engine is 'none'"]),
        (BACKEND, '{"bootstrap_port": 1, "sources": []}', ["2 mistakes"]),
        (BACKEND, "/no/such/file", ["cannot be read"]),
        (BACKEND, '{"key_file": "/no/such/key"}', ["/no/such/key"]),
        ({**BACKEND, "enable_hisparse": True}, "{}", ["--enable-hisparse is True"]),
        (LINKER, "", ["KVCONNECT_CONFIG is not set"]),
        (LINKER, "{}", ["no 'offload'", "cpu_bytes"]),
        (LINKER, '{"offload": {}}', ["cpu_bytes"]),
        (LINKER, KEPT[:-1] + ', "host": "10.0.0.1"}', ["'host'"]),
        (LINKER, '{"offload": {"cpu_bytes": 1000000, "decoded": false}}', ["offload.decoded"]),
        ({**LINKER, "enable_lora": True}, KEPT, ["--enable-lora is True"]),
        ({**LINKER, "speculative_algorithm": "EAGLE"}, KEPT, ["--speculative-algorithm is EAGLE"]),
        ({**BACKEND, **LINKER}, '{"engine": "nixl"}', ["no 'offload'"]),
        (BACKEND, KEPT, ["does not load kvconnect's linker", "--enable-unified-cache-external-linker"]),
        ({}, KEPT, ["does not load kvconnect's linker"]),
    ],
)
def test_settings_end_the_servers_start(monkeypatch, capsys, given, config, texts):
    monkeypatch.setenv("KVCONNECT_CONFIG", config)
    with pytest.raises(SystemExit):
        _check_arguments(SimpleNamespace(**given))
    printed = capsys.readouterr().err
    assert all(text in printed for text in texts), printed


def test_a_variable_of_sglang_ends_the_servers_start(monkeypatch, capsys):
    monkeypatch.setenv("KVCONNECT_CONFIG", "{}")
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    with pytest.raises(SystemExit):
        _check_arguments(SimpleNamespace(**BACKEND))
    assert "SGLANG_DISAGG_STAGING_BUFFER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "config"),
    [
        ({}, None),
        ({**BACKEND, "disaggregation_mode": "null"}, None),
        ({**BACKEND, "disaggregation_transfer_backend": "nixl"}, None),
        (BACKEND, "{}"),
        (LINKER, KEPT),
        ({**BACKEND, **LINKER}, KEPT),
    ],
)
def test_settings_that_can_be_used(monkeypatch, given, config):
    monkeypatch.delenv("KVCONNECT_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("KVCONNECT_CONFIG", config)
    _check_arguments(SimpleNamespace(**given))


def rank(dp_size=1, dp_rank=0, **more):
    parts = ("attn_tp", "attn_cp", "attn_dp", "pp")
    one = {f"{part}_size": 1 for part in parts} | {f"{part}_rank": 0 for part in parts}
    one |= {"system_dp_size": dp_size, "system_dp_rank": dp_rank}
    return one | {"rank_ip": "127.0.0.1", "rank_port": 1, "page_size": 16, "kv_cache_dtype": "auto"} | more


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def bootstrap():
    port = free_port()
    server = KVConnectBootstrapServer("127.0.0.1", port)
    until(lambda: is_open(port), "its thread listens soon")
    yield f"127.0.0.1:{port}"
    server.close()


def directory(secret=b"s" * 32, patience_s=0.5):
    return PrefillDirectory(Trust(Handles(secret, time.time)), patience_s)


def register(bootstrap, *ranks, secret=b"s" * 32):
    for number, one in enumerate(ranks):
        handle = Handles(secret, time.time).introduce("127.0.0.1", 7000 + number)
        directory().register(f"http://{bootstrap}", {**one, KEY: handle})
    every = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    until(lambda: answers(f"http://{bootstrap}/route?{every}"), "the ranks are registered soon")
    return fetch_json(f"http://{bootstrap}/route?{every}")


def test_decode_finds_the_first_rank_of_a_prefill_node(bootstrap):
    asking = directory(patience_s=10.0)
    early = asking.find(bootstrap, 3)
    assert register(bootstrap, rank())["dp_size"] == 1
    assert early.result(15) == ("127.0.0.1", 7000), "the server was starting"
    assert asking.find(bootstrap, 4).done(), "it is known"
    asking.forget(bootstrap)
    assert asking.find(bootstrap, 4).result(15) == ("127.0.0.1", 7000)


def test_the_room_chooses_the_data_parallel_rank(bootstrap):
    register(bootstrap, rank(2, 0), rank(2, 1))
    asking = directory()
    assert [asking.find(bootstrap, room).result(15)[1] for room in (8, 9)] == [7000, 7001]


def test_a_registered_rank_serves_a_room_where_the_room_does_not_choose(bootstrap):
    own = {"load_balance_method": "round_robin"}
    register(bootstrap, rank(2, 0, **own), rank(2, 1, **own))
    asking = directory(patience_s=10.0)
    found = asking.find(bootstrap, 8)
    directory().register_room(bootstrap, 8, 1)
    assert found.result(15) == ("127.0.0.1", 7001)


def test_why_a_prefill_node_is_not_found(bootstrap):
    asking = directory()
    nowhere = f"127.0.0.1:{free_port()}"
    absent = asking.find(nowhere, 1).result(15)
    assert isinstance(absent, Reason)
    assert absent.cause is Cause.OUT_OF_REACH
    assert nowhere in absent.text
    assert "503" in asking.find(bootstrap, 1).result(15).text
    register(bootstrap, rank(), secret=b"another" * 5)
    asking.forget(bootstrap)
    assert "another key" in asking.find(bootstrap, 1).result(15).text


def test_a_server_of_another_backend_is_told_apart_on_both_sides():
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, PrefillServerInfo

    port = free_port()
    theirs = CommonKVBootstrapServer("127.0.0.1", port)
    info = register(f"127.0.0.1:{port}", rank())
    assert KEY not in info
    assert "--disaggregation-transfer-backend" in directory().find(f"127.0.0.1:{port}", 1).result(15).text
    theirs.close()
    ours = KVConnectBootstrapServer("127.0.0.1", port := free_port())
    with pytest.raises(TypeError, match=KEY):
        PrefillServerInfo(**register(f"127.0.0.1:{port}", rank()))
    ours.close()
