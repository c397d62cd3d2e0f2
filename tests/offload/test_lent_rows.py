"""Rows that are lent: what peers fetch of a disk is read into these alone, and held while it is sent."""

from __future__ import annotations

import gc
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.identity import Prefix
from kvconnect.errors import PeerError
from kvconnect.offload.worker.named_rows import NamedRows
from tests.offload.test_named_rows import NAMING, TOKENS, Named, content, name_of, names, prompts
from tests.offload.worker_kit import Double

BLOCKS = {0: 12, 1: 6, 2: 6}


class Lending(Named):
    """A model of what is on disk beside that of host memory; every job for peers is looked at."""

    def __init__(self, **given):
        self.tier = Double()
        super().__init__(self.tier, peer_share=0.3, **given)
        self.work, self.classes = self.rig.worker._loop.work, self.rig.worker.plan.classes
        self.work.disk_bytes_per_s = 1e6
        fetch = self.work.fetch

        def look(job, name, now):
            if job.key is None:
                rows = self.classes[job.row_class]
                assert all(rows.num_rows <= row < rows.num_all for row in job.copies.rows)
                self.read += len(job.named)
            fetch(job, name, now)

        self.work.fetch, self.read = look, 0

    def write(self, prompt, num_tokens=TOKENS, groups=(0, 1, 2)):
        """Put a prompt on disk."""
        for group in groups:
            length = self.rig.worker.plan.row_class(group).row_bytes
            for at in range(num_tokens * BLOCKS[group] // TOKENS):
                name = name_of(prompt, group, at)
                pages = b"".join(page for region in content(self.device, group, name) for page in region)
                self.tier.kept[group, name] = pages.ljust(length, b"\0")

    def find(self, prompt, most=TOKENS, start=0):
        return self.rows.find(Prefix(NAMING, start, names(prompt)), most)

    def hold(self, prompt, num_tokens=TOKENS, start=0):
        return self.rows.hold(Prefix(NAMING, start, names(prompt)), num_tokens)

    def until_read(self, kept):
        end = time.monotonic() + 10
        while not kept.is_ready():
            assert time.monotonic() < end
            time.sleep(0.0005)


@pytest.fixture
def lending():
    made = Lending()
    yield made
    made.rig.close()


def test_what_is_on_disk_is_offered_read_and_held(lending):
    lending.write("aaaaaa")
    assert lending.find("aaaaaa")[:3] == (0, 0, TOKENS)
    assert lending.find("aaaaaa")[4] > 0
    kept = lending.hold("aaaaaa")
    lending.until_read(kept)
    assert kept.is_intact()
    lending.check_bytes(kept, "aaaaaa", TOKENS, 0)
    assert lending.read == 12 + 2 + 6, "of the window what the next token sees"
    # Another fetch of the same has the same rows, nothing is read again.
    other = lending.hold("aaaaaa")
    assert other.is_ready()
    assert lending.read == 20
    assert lending.find("aaaaaa") == (*lending.find("aaaaaa")[:2], 0, 0, 0.0)


def test_ranks_that_fetch_the_same_wait_for_one_read(lending):
    lending.write("aaaaaa")
    lending.tier.mood = "late"
    first, second = lending.hold("aaaaaa"), lending.hold("aaaaaa")
    lending.rig.until(lambda: len(lending.tier.put_off) == 3)
    assert not first.is_ready()
    assert not second.is_ready()
    lending.tier.release()
    lending.until_read(second)
    lending.check_bytes(second, "aaaaaa", TOKENS, 0)
    assert lending.read == 20


def test_rows_in_use_are_not_lent_again_and_are_free_once_they_are_let_go(lending):
    for prompt in ("aaaaaa", "bbbbbb", "cccccc", "dddddd"):
        lending.write(prompt)
    held = [lending.hold("aaaaaa")]
    lending.until_read(held[0])
    with pytest.raises(PeerError, match="in use"):
        lending.hold("dddddd")
    assert lending.find("dddddd")[2] == 0, "what cannot be read now is not offered"
    for kept, prompt in zip(held, ("aaaaaa",), strict=True):
        lending.until_read(kept)
        assert kept.is_intact()
        lending.check_bytes(kept, prompt, TOKENS, 0)
    held.clear()
    del kept
    assert lending.find("dddddd")[2] == TOKENS
    assert lending.hold("dddddd") is not None


@pytest.mark.parametrize("what", ["gone", "clear", "weights", "late"])
def test_what_is_not_read_after_all_is_not_intact(lending, what):
    lending.write("aaaaaa")
    lending.tier.mood = "late"
    if what == "late":
        lending.work.timeouts_s["read"] = 0.01
    kept = lending.hold("aaaaaa")
    lending.rig.until(lambda: len(lending.tier.put_off) == 3)
    if what == "gone":
        del lending.tier.kept[0, name_of("aaaaaa", 0, 7)]
    elif what == "clear":
        lending.rig.order(clear=True)
    elif what == "weights":
        lending.rig.worker.replace_weights({"tensors": "others"})
    if what in ("gone", "clear"):
        lending.tier.release()
    lending.until_read(kept)
    assert not kept.is_intact()
    assert lending.find("aaaaaa")[0] < TOKENS
    lending.tier.release()


def test_what_was_read_since_the_order_to_clear_is_forgotten_when_it_is_carried_out(lending):
    lending.write("aaaaaa")
    lending.tier.clear = lambda: None
    kept = lending.hold("aaaaaa")
    lending.until_read(kept)
    assert kept.is_intact()
    lending.work.clear(0.0)
    assert not kept.is_intact()
    assert lending.find("aaaaaa")[0] == 0


def test_of_a_disk_whose_rate_is_not_known_a_little_is_read(lending):
    lending.work.disk_bytes_per_s = 0.0
    lending.write("aaaaaa")
    lending.tier.mood = "late"
    assert lending.find("aaaaaa") == (0, 0, 0, 0, 0.0)
    lending.rig.until(lambda: len(lending.tier.put_off) == 3)
    assert lending.find("aaaaaa")[2] == 0
    lending.tier.release()
    lending.rig.until(lambda: lending.work.disk_bytes_per_s > 0)
    assert lending.read == 8 + 2 + 6, "once"
    assert lending.find("aaaaaa")[2] == TOKENS


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_peers_fetch_is_right_and_stays_while_it_is_sent(data):
    lending = Lending()
    held = []
    try:
        for _ in range(data.draw(st.integers(1, 20))):
            what = data.draw(
                st.sampled_from(["write", "write", "hold", "hold", "hold", "drop", "lose", "clear"])
            )
            prompt, start = data.draw(prompts), data.draw(st.sampled_from([0, 0, 8, 16]))
            if what == "write":
                lending.write(prompt, data.draw(st.sampled_from([16, 32, 48])))
            elif what == "lose" and lending.tier.kept:
                del lending.tier.kept[data.draw(st.sampled_from(sorted(lending.tier.kept)))]
            elif what == "clear" and data.draw(st.booleans()):
                lending.rig.order(clear=True)
                done = threading.Event()
                lending.rig.worker._loop.order((lambda _, done=done: done.set(), None))
                assert done.wait(10)
                assert not any(kept.is_intact() for kept, *_ in held)
                held = []
            elif what == "drop" and held:
                held.pop(data.draw(st.integers(0, len(held) - 1)))
            elif what == "hold":
                stock = lending.find(prompt, data.draw(st.integers(0, TOKENS)), start)
                num_tokens = max(stock[0], stock[2])
                assert (stock[2] > stock[0]) == (stock[3] > 0) == (stock[4] > 0)
                if num_tokens:
                    kept = lending.hold(prompt, num_tokens, start)
                    assert kept is not None, "what is found can be fetched"
                    lending.until_read(kept)
                    held.append((kept, prompt, num_tokens, start))
                    kept = None
            for kept, *about in held:
                assert kept.is_intact()
                lending.check_bytes(kept, *about)
            kept = None
        lending.rig.until_idle()
    finally:
        lending.rig.close()
        gc.collect()


def test_rows_are_lent_by_every_class():
    lending = Lending()
    try:
        assert all(rows.num_lent > 0 for rows in lending.classes)
        assert isinstance(lending.rows, NamedRows)
    finally:
        lending.rig.close()
