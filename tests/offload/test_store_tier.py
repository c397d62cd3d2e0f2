"""The shared tier against real masters: the contract of lower tiers, and everything that can go wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvconnect.config import OffloadConfig
from kvconnect.engine import mooncake_store
from kvconnect.engine.store_process import Order, Settings, StoreMemory, StoreProcess, Verb
from kvconnect.errors import EngineError
from kvconnect.offload.namespace import Namespace
from kvconnect.offload.record import HEADER_BYTES
from kvconnect.offload.store.store_tier import open_store_tier
from tests.node.node_harness import make_prompt
from tests.offload.node_kit import make_keeper
from tests.offload.store_master import StoreMaster, master_binary
from tests.offload.tier_suite import LowerTierSuite, TierDriver, blank_rows, lengths_of, some_rows, until

pytestmark = pytest.mark.skipif(master_binary() is None, reason="no mooncake_master here")
SEGMENT_BYTES = 64 << 20


def open_tier(master, *, salt="", store_bytes=SEGMENT_BYTES, queue_bytes=1 << 30):
    config = OffloadConfig(
        cpu_bytes=1 << 20, store=master, store_bytes=store_bytes, max_queued_bytes=queue_bytes
    )
    return open_store_tier(config, Namespace.of({"salt": salt}), most_row_bytes=1 << 20)


@pytest.fixture(scope="module")
def master():
    """A master, and somebody who gives the store its memory."""
    with StoreMaster() as made:
        keeper = open_tier(made.address, store_bytes=4 * SEGMENT_BYTES)
        TierDriver(keeper).seek([(0, b"it is up")])
        yield made
        assert keeper.close()


_salts = iter(range(1000))


class TestStoreTier(LowerTierSuite):
    indexed = False

    @pytest.fixture(autouse=True)
    def _master(self, master):
        self.address = master.address

    def make_tier(self, tmp_path):
        # A store outlives its users: each case has a namespace of its own.
        salt = str(next(_salts))
        return open_tier(self.address, salt=salt, store_bytes=0, queue_bytes=self.queue_bytes)


@pytest.fixture
def own_master():
    with StoreMaster() as made:
        yield made


def test_a_master_that_dies_is_missed_and_one_that_comes_back_is_used(own_master):
    tier = open_tier(own_master.address)
    driver, rows, fresh = TierDriver(tier), some_rows(10, 4), some_rows(10, 5)
    assert driver.write(rows) == ()
    own_master.kill()
    start = time.monotonic()
    assert driver.read(lengths_of(rows)) == {}
    assert set(driver.write(fresh)) == set(fresh)
    assert driver.seek(list(rows)) == set()
    # Not more than one call of the library that found out, and one that was on its way beside it.
    assert time.monotonic() - start < 12
    assert driver.failures["store_unreachable"] >= 1
    with StoreMaster(own_master.port):
        until(lambda: driver.write(fresh) == ())
        assert driver.read(lengths_of(rows | fresh)) == fresh
        assert tier.close()


def test_a_master_that_hangs_is_given_up_within_a_bound(own_master):
    tier = open_tier(own_master.address)
    tier._link._call_timeout_s = 2.0
    driver, rows = TierDriver(tier), some_rows(10, 6)
    assert driver.write(rows) == ()
    own_master.hang()
    slowest_s = 0.0

    def watch():
        nonlocal slowest_s
        while not done.is_set():
            begin = time.monotonic()
            time.sleep(0.001)
            slowest_s = max(slowest_s, time.monotonic() - begin)

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    assert driver.read(lengths_of(rows)) == {}
    assert time.monotonic() - start < 5
    assert driver.seek(list(rows)) == set()
    assert set(driver.write(rows)) == set(rows)
    assert time.monotonic() - start < 10
    assert tier.close()
    done.set()
    watcher.join()
    # The library would hold the interpreter for a minute and more.
    assert slowest_s < 1.0


def test_a_full_store_refuses_and_what_it_took_is_right(own_master):
    tier = open_tier(own_master.address, store_bytes=16 << 20)
    driver, rows = TierDriver(tier), some_rows(48, 7, length=1_000_000)
    refused = driver.write(rows)
    assert refused
    assert driver.failures == {"store_full": len(refused)}
    # The store makes room on its own account.
    found = driver.read(lengths_of(rows))
    assert found
    assert found.items() <= {content: rows[content] for content in rows if content not in refused}.items()
    assert tier.close()


def test_bytes_that_are_not_ours_are_never_given_out(own_master):
    """Another program writes into the store under one of our keys."""
    tier = open_tier(own_master.address)
    driver, rows = TierDriver(tier), some_rows(3, 8, length=4000)
    assert driver.write(rows) == ()
    memory = StoreMemory(1 << 20)
    settings = Settings(
        master=own_master.address, metadata="P2PHANDSHAKE", protocol="tcp", host="127.0.0.1", segment_bytes=0
    )
    stranger = StoreProcess(settings, memory, 1)
    spoilt = next(iter(rows))
    place = tier._keys(blank_rows({spoilt: 1})), (0,), (HEADER_BYTES + 4000,)
    assert stranger.ask(0, Order(Verb.GET, *place), 10) == place[2]
    memory.view[HEADER_BYTES + 3999] ^= 1
    for order in (Order(Verb.REMOVE, place[0]), Order(Verb.PUT, *place)):
        assert stranger.ask(0, order, 10) == (0,)
    assert driver.read(lengths_of(rows)) == {one: row for one, row in rows.items() if one != spoilt}
    assert driver.failures == {"store_corrupt": 1}
    # What was found wrong is gone, and can be kept anew.
    assert driver.seek([spoilt]) == set()
    assert driver.write(rows) == ()
    assert driver.read(lengths_of(rows)) == rows
    stranger.close()
    memory.close()
    assert tier.close()


def test_a_process_that_dies_loses_only_what_it_was_doing(own_master):
    tier = open_tier(own_master.address, store_bytes=0)
    keeper = open_tier(own_master.address)
    driver, rows = TierDriver(tier), some_rows(10, 9)
    assert TierDriver(keeper).write(rows) == ()
    assert driver.read(lengths_of(rows)) == rows
    tier._link.process._process.kill()
    assert driver.read(lengths_of(rows)) == {}
    assert driver.failures == {"store_unreachable": 1}
    until(lambda: driver.read(lengths_of(rows)) == rows)
    assert tier.close()
    assert keeper.close()


def test_the_process_loads_torch_only_where_the_library_needs_it(monkeypatch):
    found = [sys.executable, "-c", f"import {mooncake_store.__name__}, sys; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(found).returncode == 0
    loaded = []

    def load(name):
        if name == "mooncake.store" and "torch" not in loaded:
            raise ImportError("libcudart.so.12: cannot open shared object file")
        loaded.append(name)
        return name

    monkeypatch.setattr(mooncake_store.importlib, "import_module", load)
    assert mooncake_store._load_library() == "mooncake.store"
    monkeypatch.setattr(mooncake_store.importlib, "import_module", lambda name: load("mooncake.store"))
    loaded.clear()
    with pytest.raises(EngineError, match="libcudart"):
        mooncake_store._load_library()


def test_the_process_does_not_outlive_a_parent_that_is_killed(own_master):
    program = (
        "import sys, time\n"
        "from tests.offload.test_store_tier import *\n"
        "tier = open_tier(sys.argv[1])\n"
        "assert TierDriver(tier).write(some_rows(1, 1)) == ()\n"
        "print(tier._link.process._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, own_master.address],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    try:
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        parent.kill()
        parent.wait()
        until(lambda: not Path(f"/proc/{child}/exe").exists(), timeout_s=10)
    finally:
        parent.kill()
        parent.stdout.close()


PROMPT = make_prompt(200, seed=1)


def test_a_prompt_that_another_node_computed_is_found(own_master):
    model, store = "hybrid", {"store": own_master.address}
    first = make_keeper(model=model, offload={**store, "store_bytes": 64 << 20})
    tokens = first.ask(PROMPT)
    again = first.ask(PROMPT)
    cached = first.cached
    assert again == tokens
    assert cached > 100
    second = make_keeper(model=model, offload=store)
    assert second.ask(PROMPT) == tokens
    assert second.cached == cached
    # Another one knows nothing of it.
    other = make_keeper(model=model, offload={**store, "salt": "another"})
    assert other.ask(PROMPT) == tokens
    assert other.cached == 0


def test_a_node_whose_store_is_gone_computes(own_master):
    keeper = make_keeper(offload={"store": own_master.address, "store_bytes": 64 << 20, "wait_s": 1.0})
    tokens = keeper.ask(PROMPT)
    own_master.kill()
    assert keeper.ask(PROMPT) == tokens
    # Host memory has it all the same.
    assert keeper.cached > 100
    assert len(keeper.ask(make_prompt(200, seed=2))) == len(tokens)
    assert keeper.cached == 0
