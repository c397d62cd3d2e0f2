"""What an engine is given: slots, and no page; and how it is given back."""

from __future__ import annotations

import gc
import socket
import threading
import weakref

import pytest

from kvconnect.config import parse_kv_transfer_config
from kvconnect.engine.memory import MemoryEngine
from kvconnect.errors import ConfigError, LocalError
from kvconnect.halves.rank_traits import RankTraits, SentCache
from kvconnect.halves.worker_half import TransferWorker
from kvconnect.halves.worker_transfers import WorkerTransfers
from kvconnect.pack.arena import Arena
from kvconnect.peer.messages import CacheMeaning
from tests.identities import named
from tests.ports import free_port
from tests.transfer.pair import HEADS, PlainCache


class Recording(MemoryEngine):
    def register(self, spans):
        self.given = list(spans)
        super().register(spans)


def start(engine, role, **extra):
    """A worker that serves peers, and its cache."""
    config = parse_kv_transfer_config({"kv_role": role, "kv_connector_extra_config": extra})
    cache = PlainCache(8)
    traits = RankTraits(sent=SentCache(cache.described, CacheMeaning(named(), HEADS, 1)))
    return TransferWorker(config, traits, engine=engine), cache.storage


def registered(role, **extra):
    """The spans that a worker's engine is given, and the addresses of its cache's first and last byte."""
    engine = Recording("127.0.0.1")
    worker, cache = start(engine, role, **extra)
    worker.close()
    return engine.given, cache.data_ptr(), cache.data_ptr() + cache.numel() * 2 - 1


class Stuck(MemoryEngine):
    """An engine whose poll does not return until it is let go."""

    def __init__(self, host):
        super().__init__(host)
        self.polled, self.go_on, self.closed = threading.Event(), threading.Event(), threading.Event()

    def poll(self):
        self.polled.set()
        self.go_on.wait(20)
        return super().poll()

    def close(self):
        super().close()
        self.closed.set()


@pytest.mark.parametrize("fails", ["port", "thread"])
def test_a_worker_that_cannot_start_leaves_nothing_open(monkeypatch, fails):
    engine = Stuck("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if fails == "port" else 0
        if fails == "thread":
            monkeypatch.setattr(WorkerTransfers, "serve", lambda *_: 1 / 0)
        with pytest.raises(ConfigError if fails == "port" else ZeroDivisionError):
            start(engine, "kv_both", slot_bytes=1 << 16, port=port)
    assert engine.closed.is_set()


def test_a_thread_that_does_not_stop_is_reported_and_releases_all_when_it_does(monkeypatch, caplog):
    monkeypatch.setattr("kvconnect.halves.worker_half._CLOSE_TIMEOUT_S", 0.2)
    engine = Stuck("127.0.0.1")
    worker, _ = start(engine, "kv_both", slot_bytes=1 << 16)
    assert engine.polled.wait(5)
    worker.close()
    assert not engine.closed.is_set(), "closed under a running call"
    assert worker._metrics.failures.values()[("close_timeout",)] == 1
    assert "did not stop within 0.2 s" in caplog.text
    assert "engine memory" in caplog.text
    worker.close()
    engine.go_on.set()
    assert engine.closed.wait(5)


def covers(spans, address):
    return any(span.address <= address < span.address + span.length_bytes for span in spans)


@pytest.mark.parametrize(("role", "arenas"), [("kv_producer", 1), ("kv_consumer", 1), ("kv_both", 2)])
def test_slots_are_registered_and_no_page(role, arenas):
    spans, first, last = registered(role, slot_bytes=1 << 16)
    assert len(spans) == arenas
    assert not covers(spans, first)
    assert not covers(spans, last)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_the_memory_of_all_slots_lives_as_long_as_the_worker(role, monkeypatch):
    arenas = []

    class Watched(Arena):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            arenas.append(weakref.ref(self))

    monkeypatch.setattr("kvconnect.transfer.local.Arena", Watched)
    worker, _ = start(MemoryEngine("127.0.0.1"), role, slot_bytes=1 << 16)
    gc.collect()
    assert len(arenas) == (2 if role == "kv_both" else 1)
    assert all(arena() is not None for arena in arenas)
    worker.close()


def test_an_error_after_the_slots_leaves_nothing_registered_and_nothing_open(monkeypatch):
    def out_of_memory(*, with_gpus):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("kvconnect.transfer.local.look_at_fabric", out_of_memory)
    engine, port = Recording("127.0.0.1"), free_port()
    engine.given = []
    for _ in range(2):
        # What listens at the port was closed the first time.
        with pytest.raises(RuntimeError, match="out of memory"):
            start(engine, "kv_both", slot_bytes=1 << 16, port=port)
    assert engine.given == []


def test_a_worker_sleeps_only_once_its_thread_has_let_go(monkeypatch):
    """A stack takes the pages away as soon as the call returns."""
    monkeypatch.setattr("kvconnect.halves.worker_half._CLOSE_TIMEOUT_S", 0.3)
    engine = Stuck("127.0.0.1")
    worker, _ = start(engine, "kv_both", slot_bytes=1 << 16)
    assert engine.polled.wait(5)
    with pytest.raises(LocalError, match="cannot sleep: .* pages are still being read"):
        worker.sleep()
    engine.go_on.set()
    worker.sleep()
    worker.wake()
    monkeypatch.setattr(worker.decode, "loads", {"a": None, "b": None})
    with pytest.raises(LocalError, match="cannot sleep: requests are being loaded"):
        worker.sleep()
    monkeypatch.undo()
    worker.close()
