"""The linker on SGLang's unified cache and its pools, driven as its scheduler drives it, without servers."""

from __future__ import annotations

import inspect
import json
import os
import random
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here; make test-sglang")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins.hook_registry import HookRegistry

from kvconnect.errors import ConfigError
from kvconnect.sglang import linker as linker_module
from kvconnect.sglang.linker import KVConnectLinker
from tests.offload.store_master import StoreMaster, master_binary
from tests.sglang.servers import WHEN_IMPORTED
from tests.sglang_contract.linked_cache import PAGE, PAGES, LinkedCache, Request
from tests.vllm.tiny_models import write_model

DISK_BYTES = 1 << 22
LONG = random.Random(1).choices(range(250), k=PAGE * 20 + 3)
OTHER = random.Random(2).choices(range(250), k=PAGE * 20)
WHOLE = len(LONG) // PAGE * PAGE


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model("gqa", tmp_path_factory.mktemp("model")).folder


@pytest.fixture
def make(model, monkeypatch):
    made = []

    def build(**offload):
        made.append(LinkedCache(offload.pop("model", model), monkeypatch, **offload))
        return made[-1]

    yield build
    for one in made:
        one.cache.release_host_resources()


def on_disk(folder, **more):
    return {"disk_path": str(folder), "disk_bytes": DISK_BYTES, **more}


@pytest.fixture(scope="session")
def left(model, tmp_path_factory):
    """What a server that has ended left on disk: the pages of ``LONG``."""
    folder = tmp_path_factory.mktemp("left")
    with pytest.MonkeyPatch.context() as patched:
        rig = LinkedCache(model, patched, **on_disk(folder))
    rig.served(LONG)
    rig.leave_device()
    rig.cache.release_host_resources()
    return folder


@pytest.fixture
def folder(left, tmp_path):
    """A copy of it that is the test's own."""
    return shutil.copytree(left, tmp_path / "disk")


def test_every_method_is_there_and_takes_what_sglang_gives():
    assert not KVConnectLinker.__abstractmethods__
    for name in UnifiedCacheLinker.__abstractmethods__:
        theirs, ours = (
            inspect.signature(getattr(one, name)) for one in (UnifiedCacheLinker, KVConnectLinker)
        )
        assert list(theirs.parameters) == list(ours.parameters)


def test_hooks_are_where_sglang_calls_them(make):
    make()
    from sglang.srt.disaggregation import decode, prefill
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.scheduler_components import weight_updater

    patched = [name.rpartition(".")[2] for name in HookRegistry._patched if "kvconnect" not in name]
    called = {
        "get_new_batch_prefill": (scheduler, prefill),
        "process_decode_queue": (decode,),
        "flush_cache_after_weight_update": (weight_updater,),
    }
    for name, modules in called.items():
        assert name in patched
        assert all(f"self.{name}(" in inspect.getsource(module) for module in modules)
    # These the scheduler's dispatcher calls, which is made after the linker.
    for name in ("end_weight_update", "release_memory_occupation"):
        assert name in patched
        assert f"self.weight_updater.{name}," in inspect.getsource(
            scheduler.Scheduler.init_request_dispatcher
        )
    # Where SGLang asks a decode server for ended offloads itself, ``free_offloaded`` can go.
    assert (
        "if self.enable_decode_hicache:\n            self.tree_cache.check_hicache_events()"
        in inspect.getsource(decode)
    )


@pytest.mark.parametrize(
    "more", [{}, {"latent": True}, {"dtype": torch.bfloat16}], ids=["mha", "mla", "bfloat16"]
)
def test_pages_that_left_the_device_come_back(make, more):
    rig = make(**more)
    assert rig.served(LONG).loaded == 0
    again = rig.served(LONG)
    assert (again.loaded, again.result.device_prefix_len) == (0, WHOLE)
    rig.leave_device()
    assert rig.served(LONG).loaded == WHOLE
    # A part on the device, a part in host memory, and a part that is new.
    rig.leave_device()
    rig.served(LONG[: PAGE * 5])
    longer = rig.served([*LONG[:WHOLE], *OTHER[: PAGE * 4]])
    assert (longer.result.device_prefix_len, longer.loaded) == (PAGE * 5, WHOLE - PAGE * 5)
    rig.leave_device()
    assert rig.served(LONG[:WHOLE]).loaded == WHOLE - PAGE, "the last token is computed"


def test_other_salts_find_nothing(make):
    rig = make()
    rig.served(LONG, salt="one")
    rig.leave_device()
    assert rig.served(LONG).loaded == 0
    assert rig.served(LONG, salt="other").loaded == 0
    rig.leave_device()
    assert rig.served(LONG, salt="one").loaded == WHOLE


def test_another_server_finds_nothing_in_the_folder(make, model, folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(model, other)
    (weights,) = other.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    for change in ({"model": other}, {"dtype": torch.bfloat16}, {"salt": "x"}, {"latent": True}):
        rig = make(**{**on_disk(folder), **change})
        rig.settle()
        assert rig.served(LONG).loaded == 0, change
        rig.cache.release_host_resources()


def test_damage_is_a_miss(make, folder):
    tenth = get_storage_hash_str(Request(LONG).key(WHOLE), None, page_size=PAGE)[9]
    (path,) = [path for path in folder.rglob("*.kv") if tenth in path.name]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    second = make(**on_disk(folder))
    second.settle()
    assert second.served(LONG).loaded == 9 * PAGE
    second.leave_device()
    assert second.served(LONG).loaded == WHOLE


def answer_no_read(rig):
    """From now on reads of the disk never end."""
    (disk,) = rig.linker.worker.offload._loop.tiers
    begin = disk.begin
    disk.begin = lambda call: None if call.kind == "read" else begin(call)


def test_a_disk_that_does_not_answer_is_a_miss(make, folder):
    second = make(**on_disk(folder), wait_s=0.2)
    second.settle()
    answer_no_read(second)
    waits, other = Request(LONG), Request(OTHER)
    # The one waits in SGLang's queue; others go on meanwhile.
    assert second.run(waits, other) == [other]
    assert second.waiting == [waits]
    assert second.run() == []
    done = []
    second.until(lambda: done.extend(second.run()) or waits in done)
    assert waits.loaded == 0


@pytest.mark.skipif(master_binary() is None, reason="no mooncake_master here")
def test_servers_share_a_store(make):
    with StoreMaster() as master:
        shared = {"store": master.address, "store_bytes": 64 << 20, "wait_s": 3.0}
        first, second = make(**shared), make(**shared)
        first.served(LONG)
        first.settle()
        assert second.served(LONG).loaded == WHOLE
        first.cache.release_host_resources()
        master.hang()
        began = time.monotonic()
        assert second.served(OTHER).loaded == 0
        assert time.monotonic() - began < 10
        master.kill()
        second.cache.release_host_resources()


def test_a_request_that_left_while_it_waited(make, folder):
    second = make(**on_disk(folder))
    second.settle()
    second.run(Request(LONG))
    second.waiting.clear()
    second.run(Request(OTHER))
    second.settle()
    assert second.served(LONG).loaded == WHOLE
    second.leave_device()
    assert pinned(second) == 0


def pinned(rig):
    index = rig.linker.scheduler.offload.host.index
    return sum(counts.pinned for counts in index.counts().values())


def serve_as_a_rank(rank, folder, model):
    """In a process of its own: rank 1 has less memory, and its disk does not answer from some time on."""
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    given = on_disk(folder / "disk", wait_s=0.5, cpu_bytes=(1 << 18, 50 << 10)[rank])
    group, environment = torch.distributed.group.WORLD, SimpleNamespace(setenv=os.environ.__setitem__)
    rig, found = LinkedCache(model, environment, rank=rank, group=group, **given), []

    def go_on(prompt):
        # Both ranks have the same loops, so that their collective calls meet.
        request, done = Request(prompt), []
        for number in range(400):
            done += rig.run(*([request] if number == 0 else ()))
            time.sleep(0.002)
        assert done == [request]
        found.append(request.loaded)

    for prompt in (
        LONG,
        LONG,
        *(random.Random(seed).choices(range(250), k=WHOLE) for seed in (11, 12, 13)),
        LONG,
    ):
        if len(found) == 2 and rank == 1:
            answer_no_read(rig)
        go_on(prompt)
        rig.cache.evict(EvictParams(num_tokens=PAGE * PAGES))
    assert not rig.cache.linker.pending_offloads
    (folder / f"found {rank}").write_text(json.dumps(found))
    os._exit(0)


def test_ranks_agree(model, tmp_path):
    command = f"from {__name__} import *; from pathlib import Path\n"
    command += "serve_as_a_rank(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))"
    start = [sys.executable, "-c", command]
    environment = {**os.environ, **WHEN_IMPORTED}
    ranks = [subprocess.Popen([*start, f"{rank}", tmp_path, model], env=environment) for rank in (0, 1)]
    try:
        assert [rank.wait(200) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (json.loads((tmp_path / f"found {rank}").read_text()) for rank in (0, 1))
    # What one rank has alone, and what it cannot read, is computed by both.
    assert first == second
    assert first[:5] == [0, WHOLE, 0, 0, 0]
    assert first[5] < WHOLE


def test_a_queued_load_is_withdrawn(make):
    rig = make()
    rig.served(LONG)
    rig.leave_device()
    request = Request(LONG)
    request.init_next_round_input(rig.cache)
    keys = rig.cache.linker.hit_markers[request.rid].tail_hashes
    slots = rig.allocator.alloc(WHOLE)
    transfer = SimpleNamespace(keys=keys, device_indices=slots)
    assert rig.linker.load(request.rid, [transfer])
    assert rig.linker.cancel_queued_load(request.rid)
    assert not rig.linker.cancel_queued_load(request.rid)
    assert rig.linker.start_layer_wise_loading() == -1
    rig.allocator.free(slots)
    assert pinned(rig) == 0
    # What was not looked up, or is gone, is refused, and SGLang computes it.
    assert not rig.linker.load("unknown", [transfer])
    assert rig.served(LONG).loaded == WHOLE


def test_a_failed_copy_fails_its_requests_and_no_other(make, monkeypatch):
    rig = make()
    rig.served(LONG)
    rig.leave_device()
    copier, restore = rig.linker.worker.offload._copier, None
    restore = copier.restore
    monkeypatch.setattr(copier, "restore", lambda *given: (_ for _ in ()).throw(OSError("broken")))
    request = Request(LONG)
    request.init_next_round_input(rig.cache)
    transfer = SimpleNamespace(
        keys=rig.cache.linker.hit_markers[request.rid].tail_hashes, device_indices=rig.allocator.alloc(WHOLE)
    )
    assert rig.linker.load(request.rid, [transfer])
    batch = rig.linker.start_layer_wise_loading()
    rig.linker.layer_done_counter.set_consumer(batch)
    rig.linker.layer_done_counter.wait_until(0)
    assert not rig.linker.finish_layer_wise_loading(batch)
    rig.allocator.free(transfer.device_indices)
    monkeypatch.setattr(copier, "restore", restore)
    # What could not be copied is not found again until it is kept anew.
    assert rig.served(LONG).loaded == 0
    rig.leave_device()
    assert rig.served(LONG).loaded == WHOLE


def test_overload_is_bounded(make):
    row_bytes = next(iter(make().linker.worker.offload.row_bytes.values()))
    rig = make(cpu_bytes=row_bytes * 25)
    for seed in range(8):
        rig.served(random.Random(seed).choices(range(250), k=PAGE * 20))
        rig.settle()
    rig.served(LONG)
    rig.leave_device()
    # Of what is longer than host memory its beginning is kept.
    assert rig.served(LONG).loaded == WHOLE
    rig.leave_device()
    beyond = random.Random(9).choices(range(250), k=PAGE * (PAGES - 2))
    rig.served(beyond)
    rig.leave_device()
    assert 0 < rig.served(beyond).loaded <= 25 * PAGE


def test_offloads_are_reported_in_order(make):
    rig = make()
    prompts = [random.Random(seed).choices(range(250), k=PAGE * 4) for seed in range(3)]
    rig.run(*map(Request, prompts))
    assert len(rig.cache.linker.pending_offloads) == 3
    rig.settle()
    assert rig.linker.num_completed_offloads() == 0
    # Nothing is kept twice.
    rig.run(Request(prompts[0]))
    assert not rig.cache.linker.pending_offloads


def test_reset_forgets_all(make, tmp_path):
    rig = make(**on_disk(tmp_path))
    rig.served(LONG)
    rig.cache.reset()
    rig.allocator.clear()
    assert rig.served(LONG).loaded == 0
    # Rows that the disk still reads get no new content.
    rig.settle()
    rig.served(OTHER)
    rig.leave_device()
    assert rig.served(OTHER[:-1]).loaded == len(OTHER) - PAGE


def test_replaced_weights_share_no_names_with_any_process(make, tmp_path):
    rig = make(**on_disk(tmp_path))
    rig.served(LONG)
    rig.settle()
    before = rig.linker.worker.offload.namespace.name
    linker_module.weights_replaced((True, ""))
    rig.cache.reset()
    rig.allocator.clear()
    assert rig.served(LONG).loaded == 0
    rig.leave_device()
    assert rig.served(LONG).loaded == WHOLE
    assert rig.linker.worker.offload.namespace.name != before
    rig.cache.release_host_resources()
    again = make(**on_disk(tmp_path))
    again.settle()
    assert again.served(LONG).loaded == 0


def test_many_updates_in_a_row_open_the_tiers_once(make, tmp_path, monkeypatch):
    rig, renamed = make(**on_disk(tmp_path)), []
    rig.served(LONG)
    monkeypatch.setattr(rig.linker.worker, "replace_weights", renamed.append)
    for _ in range(50):
        linker_module.weights_replaced((True, ""))
    assert not renamed
    rig.cache.reset()
    rig.allocator.clear()
    rig.served(LONG)
    assert len(renamed) == 1


def test_before_memory_is_given_back_no_page_is_copied(make):
    rig = make()
    rig.run(Request(LONG))
    rig.cache.check_hicache_events()
    linker_module.settle(object())
    assert not rig.linker._storing
    assert rig.linker.num_completed_offloads() == len(rig.cache.linker.pending_offloads)


def test_a_lookup_of_a_page_less_or_more_keeps_what_was_found(make):
    rig = make()
    rig.served(LONG)
    rig.leave_device()
    names = [
        bytes.fromhex(name) for name in get_storage_hash_str(Request(LONG).key(WHOLE), None, page_size=PAGE)
    ]
    assert rig.linker.find("r", names) == len(names)
    lookup = rig.linker._asked["r"]
    assert rig.linker.find("r", names[:-1]) == len(names) - 1
    assert rig.linker.find("r", names) == len(names)
    assert rig.linker._asked["r"] is lookup
    # Without the first page, which is on the device now: other names are another lookup.
    assert rig.linker.find("r", names[1:]) == len(names) - 1
    assert rig.linker._asked["r"] is not lookup
    rig.linker.forget_others(())


def test_a_hit_that_is_not_taken_is_forgotten(make):
    """The first of some requests of one prompt restores it; the others find it on the device."""
    rig = make()
    rig.served(LONG)
    rig.leave_device()
    waiting = [Request(LONG) for _ in range(3)]
    scheduler = SimpleNamespace(waiting_queue=waiting, tree_cache=rig.cache)
    linker_module.hold_back(lambda scheduler: None, scheduler)
    assert rig.cache.linker.hit_markers.keys() == {request.rid for request in waiting}
    rig.run(waiting[0])
    rig.run(*waiting[1:])
    rig.run(Request(OTHER))
    assert not rig.cache.linker.hit_markers


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"components": {ComponentType.FULL, ComponentType.SWA}}, "MHATokenToKVPool with SWA"),
        ({"components": {ComponentType.FULL, ComponentType.MAMBA}}, "MHATokenToKVPool with MAMBA"),
        ({"extra_config": {"cpu_bytes": 1}}, "KVCONNECT_CONFIG"),
    ],
)
def test_what_is_not_kept_is_refused_by_name(make, change, text):
    rig = make()
    given = {"components": {ComponentType.FULL}, **change}
    with pytest.raises(ConfigError, match=text):
        KVConnectLinker(SimpleNamespace(), rig.params, **given)
