"""The tiers' KV events on a node: a router that hears nothing else knows what host memory and disk hold."""

from __future__ import annotations

import functools
import random
import shutil
from collections import Counter

import pytest

from kvconnect.node import node_connector
from kvconnect.node.block_manager import PrefixHashes
from kvconnect.offload.tier import DISK, HOST
from kvconnect.offload.tier_events import TierEvents
from tests.node.node_harness import make_prompt
from tests.offload.half_kit import Plain, Replay
from tests.offload.node_kit import POOLS, disk_settings, make_keeper

ROWS = {"gqa": 22 << 15, "sliding": 200 << 14, "hybrid": 96 << 13, "mixed": 5 << 17}


class Heard:
    """Has the next nodes announce what their tiers hold, and hears that as a serving stack would.

    ``links`` are those of all requests so far: of a window or a state, what comes before is not announced.
    """

    def __init__(self, monkeypatch, links=None):
        self.events, self.router = TierEvents(Plain()), Replay(links)
        self.counts: Counter[str] = Counter()
        for name, stated in (("KeptCache", {"announces": True}), ("KeptBlocks", {"events": self.events})):
            made = functools.partial(getattr(node_connector, name), **stated)
            monkeypatch.setattr(node_connector, name, made)

    def check(self, keeper):
        for request in keeper.requests.values():
            names = PrefixHashes(1)
            names.extend_to(request.token_ids)
            self.router.learn(request.token_ids, names)
        while self.events:
            for event in self.events.take():
                self.counts[f"{event.tier} {type(event).__name__}"] += 1
                self.router.apply([event])
        self.router.check(keeper.engine.scheduler.hooks.offload)


@pytest.mark.parametrize("model", sorted(ROWS))
def test_what_was_heard_is_what_is_there(monkeypatch, tmp_path, model):
    """Prompts come and return, rows make room, records are spoilt, all is cleared, and the disk is lost."""
    rng, heard = random.Random(model), Heard(monkeypatch)
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
            keeper.engine.scheduler.hooks.reset()
            keeper.settle()
        if number == 20:
            shutil.rmtree(next(path for path in tmp_path.iterdir() if path.is_dir()))
    heard.check(keeper)
    assert not heard.router.num_unknown
    for tier in (HOST, DISK):
        assert heard.counts[f"{tier} Stored"], heard.counts
        assert heard.counts[f"{tier} Removed"], heard.counts


@pytest.mark.parametrize("model", sorted(ROWS))
def test_what_a_disk_held_before_a_restart_is_announced_with_its_tokens(monkeypatch, tmp_path, model):
    settings, on_disk, links = disk_settings(tmp_path, disk_bytes=4 << 20), [], {}
    for lengths in ((40, 150, 97), ()):
        heard = Heard(monkeypatch, links)
        keeper = make_keeper(offload=settings, model=model)
        for length in lengths:
            keeper.ask(make_prompt(length, seed=length), 20)
        heard.check(keeper)
        keeper.close()
        held = heard.router.held.items()
        on_disk.append({group: names for (tier, group), names in held if tier == DISK})
    assert on_disk[0] == on_disk[1]
    assert any(on_disk[0].values())
    assert not heard.router.num_unknown


def test_a_record_without_a_footer_is_announced_without_tokens(monkeypatch, tmp_path):
    """As one that was written while nobody listened; what it stands for is known once a request wants it."""
    prompt = make_prompt(100)
    keeper = make_keeper(offload=disk_settings(tmp_path))
    keeper.ask(prompt, 4)
    keeper.close()
    heard = Heard(monkeypatch)
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
