"""A node's KV events: a router that hears nothing else knows what device, host memory and disk hold."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from itertools import pairwise

import msgspec
import pytest
import zmq

from kvconnect.errors import ConfigError
from kvconnect.node import serving as serve
from kvconnect.node.block_manager import PrefixHashes
from kvconnect.node.kv_events import KVEventsConfig, configured_publisher
from kvconnect.offload.tier import DISK, HOST
from kvconnect.offload.tier_events import DEVICE, TierEvents
from tests.node.node_harness import make_client, make_prompt
from tests.offload.half_kit import Plain, Replay
from tests.offload.node_kit import POOLS, disk_settings, make_keeper
from tests.ports import free_port

ROWS = {"gqa": 22 << 15, "sliding": 200 << 14, "hybrid": 96 << 13, "mixed": 5 << 17}


PREFIXES = {b"": []}
"""What each hash that was heard stands for."""


def hashed(before, tokens):
    whole = PREFIXES[before] + list(tokens)
    hashes = PrefixHashes(len(whole))
    hashes.extend_to(whole)
    PREFIXES[hashes[0]] = whole
    return hashes[0]


class Heard:
    """Stands for a publisher, and hears it."""

    def __init__(self, *_):
        self.events, self.router = TierEvents(Plain()), Replay(hashed, b"")
        self.counts: Counter[str] = Counter()

    def publish(self):
        for event in self.events.take():
            self.counts[f"{event.tier} {type(event).__name__}"] += 1
            self.router.apply([event])

    def close(self):
        pass

    def check(self, keeper):
        while self.events:
            self.publish()
        pool, half = keeper.engine.scheduler.manager.pool, keeper.engine.scheduler.transfers.hooks.offload
        self.router.check(half)
        on_device = {}
        for group, name in pool._block_of:
            on_device.setdefault((DEVICE, group), set()).add(name)
        told = {key: names for key, names in self.router.held.items() if key[0] == DEVICE and names}
        assert told == on_device


@pytest.fixture
def heard(monkeypatch):
    made = Heard()
    monkeypatch.setattr(serve, "configured_publisher", lambda *_: made)
    return made


@pytest.mark.parametrize("model", sorted(ROWS))
def test_what_was_heard_is_what_is_there(heard, tmp_path, model):
    """Prompts come and return, rows make room, records are spoilt, all is cleared, and the disk is lost."""
    rng = random.Random(model)
    keeper = make_keeper(
        offload=disk_settings(tmp_path, cpu_bytes=ROWS[model], disk_bytes=1 << 20),
        model=model,
        enable_prefix_caching=True,
        num_blocks=POOLS[model],
    )
    prompts = [make_prompt(rng.randrange(20, 200), seed=number) for number in range(5)]
    for number in range(28):
        prompt = rng.choice(prompts)
        keeper.ask(prompt[: rng.randrange(10, 200)] + make_prompt(rng.choice([0, 30]), seed=number), 6)
        heard.check(keeper)
        if number % 5 == 2:
            spoil(rng, tmp_path)
        if number == 11:
            keeper.engine.scheduler.transfers.hooks.reset()
            keeper.settle()
        if number == 20:
            shutil.rmtree(next(path for path in tmp_path.iterdir() if path.is_dir()))
    heard.check(keeper)
    assert not heard.router.num_unknown
    stateless = model != "hybrid"
    for tier in (HOST, DISK, *([DEVICE] if stateless else [])):
        assert heard.counts[f"{tier} Stored"], heard.counts
        assert heard.counts[f"{tier} Removed"], heard.counts


@pytest.mark.parametrize("model", sorted(ROWS))
def test_what_a_disk_held_before_a_restart_is_announced_with_its_tokens(monkeypatch, tmp_path, model):
    first, second = Heard(), Heard()
    settings = disk_settings(tmp_path, disk_bytes=4 << 20)
    prompts = [make_prompt(length, seed=length) for length in (40, 150, 97)]
    for heard in (first, second):
        monkeypatch.setattr(serve, "configured_publisher", lambda *_, heard=heard: heard)
        keeper = make_keeper(offload=settings, model=model)
        for prompt in prompts if heard is first else ():
            keeper.ask(prompt, 20)
        heard.check(keeper)
        keeper.close()
    on_disk = [
        {group: names for (tier, group), names in heard.router.held.items() if tier == DISK}
        for heard in (first, second)
    ]
    assert on_disk[0] == on_disk[1]
    assert any(on_disk[0].values())
    assert not second.router.num_unknown


def test_a_record_without_a_footer_is_announced_without_tokens(heard, monkeypatch, tmp_path):
    """As one that was written while nobody listened; what it stands for is known once a request wants it."""
    prompt = make_prompt(100)
    with monkeypatch.context() as patched:
        patched.setattr(serve, "configured_publisher", lambda *_: None)
        keeper = make_keeper(offload=disk_settings(tmp_path))
        keeper.ask(prompt, 4)
        keeper.close()
    keeper = make_keeper(offload=disk_settings(tmp_path))
    heard.check(keeper)
    assert heard.router.num_unknown == 6
    keeper.ask(prompt, 4)
    heard.check(keeper)
    assert keeper.cached == 96
    assert heard.counts["host Stored"] == 1
    assert heard.router.num_unknown == 6


def spoil(rng, folder):
    """A disk gives other bytes than were written."""
    for path in sorted(folder.rglob("*.kv")):
        if rng.random() < 0.5:
            path.write_bytes(path.read_bytes()[:-1] + b"x")


def test_a_node_publishes_what_it_holds_and_repeats_it_for_those_who_missed_it():
    ports = free_port(), free_port()
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv-events",
        "endpoint": f"tcp://*:{ports[0]}",
        "replay_endpoint": f"tcp://*:{ports[1]}",
    }
    client = make_client(kv_events_config=json.dumps(config))
    try:
        prompt = make_prompt(100)
        client.complete(prompt, 4)
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.RCVTIMEO, 5000)
            asking.connect(f"tcp://127.0.0.1:{ports[1]}")
            asking.send_multipart((b"", b"bad"))
            asking.send_multipart((b"", (0).to_bytes(8, "big")))
            told = []
            while (frames := asking.recv_multipart())[2] != (-1).to_bytes(8, "big", signed=True):
                assert frames[:2] == [b"", b"kv-events"]
                assert int.from_bytes(frames[2], "big") == len(told)
                told.append(msgspec.msgpack.decode(frames[3]))
        stored = [event for batch in told for event in batch[1]]
        assert [event["type"] for event in stored] == ["BlockStored"] * len(stored)
        assert [token for event in stored for token in event["token_ids"]] == prompt[:96]
        assert {event["medium"] for event in stored} == {"GPU"}
        assert stored[0]["kv_cache_spec_kind"] == "full_attention"
        for before, after in pairwise(stored):
            assert after["parent_block_hash"] == before["block_hashes"][-1]
    finally:
        client.engine.stop()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "kv_events_config is not JSON"),
        ("[]", "kv_events_config holds list; accepted: a JSON object"),
        ('{"enable_cache_events": true}', "did you mean 'enable_kv_cache_events'"),
        ('{"enable_kv_cache_events": true, "publisher": "http"}', "publisher is 'http'"),
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://*:none"}', "nothing can be published on"),
        ('{"enable_kv_cache_events": true, "buffer_steps": -1}', "buffer_steps.* is -1.* >= 0"),
        ('{"enable_kv_cache_events": true, "hwm": -5}', "hwm.* is -5.* >= 0"),
        ('{"enable_kv_cache_events": true, "hwm": 1099511627776}', "hwm.* is 1099511627776.* <= 2147483647"),
    ],
)
def test_a_wrong_configuration_names_what_is_accepted(text, problem):
    with pytest.raises(ConfigError, match=problem):
        make_client(kv_events_config=text)


def test_nothing_is_noted_where_nobody_listens():
    for text in (None, "{}", '{"enable_kv_cache_events": true, "publisher": "null"}'):
        assert configured_publisher(text, None) is None
    assert make_client().engine.scheduler.manager.pool.events is None
    assert KVEventsConfig().endpoint == "tcp://*:5557", "as vLLM"
