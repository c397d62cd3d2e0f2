"""Rows by name: what is found holds those bytes, and what was overwritten since is known to be."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.errors import ConfigError, PeerError
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.worker import tier_loop
from kvconnect.transfer.orders import RowCopies, Store, TierFetch
from tests.offload.worker_kit import Double, Rig, caches

NAMING = Naming("test", 4)
BLOCK = {0: 4, 1: 8, 2: 8}
"""Tokens of a block by group; group 1 sees 16 tokens, group 2 has two kernel blocks in one."""
TOKENS = 48


def names(prompt, count=TOKENS // 4):
    """Prompts with equal first digits have a prefix in common, of 8 tokens for each digit."""
    return tuple(f"{prompt[: at // 2 + 1]}/{at}".encode() for at in range(count))


def name_of(prompt, group, position):
    step = BLOCK[group] // 4
    return names(prompt)[(position + 1) * step - 1]


def content(table, group, name):
    """What the pages of a block of this name are, by region and kernel page."""
    ratio = table.geometry()[group].blocks_per_kv_block
    random = np.random.default_rng([group, *name])
    regions = [region for region in table.regions if region.group == group]
    return [[random.bytes(region.page_bytes) for _ in range(ratio)] for region in regions]


NOTHING = 0, 0, 0, 0, 0.0


class Named:
    """A rig whose rows have names, and a model of it: which name is where."""

    def __init__(self, *tiers, drafts=(), **settings):
        self.rig = Rig(*tiers, **settings)
        self.needs = HitRequirements.of(caches()[0].groups, (0, 1, 2), 8, drafts)
        self.rig.worker.name_rows(NAMING, self.needs)
        self.rows = self.rig.worker.names
        self.device, self.table = self.rig.table, self.rows.table
        self.places, self.number = {}, 0

    def row_of(self, group, row):
        return self.rig.worker.plan.class_of[group], row

    def write_block(self, group, block, name):
        geometry = self.device.geometry()[group]
        regions = [region for region in self.device.regions if region.group == group]
        for region, pages in zip(regions, content(self.device, group, name), strict=True):
            for part, page in enumerate(pages):
                at = block * geometry.blocks_per_kv_block + part
                ctypes.memmove(region.address + at * region.block_stride, page, len(page))

    def order(self, group, pairs, **orders):
        """Order what writes to rows; ``pairs`` are of name and row. Nobody finds what they had before."""
        gone = {self.row_of(group, row) for _, row in pairs}
        self.places = {what: row for what, row in self.places.items() if row not in gone}
        self.rig.order(**orders)

    def placed(self, group, pairs, number=0):
        """What the last job wrote, or that of a number, is there."""
        self.until_reported(number or self.number)
        self.places.update(((group, name), self.row_of(group, row)) for name, row in pairs)

    def until_reported(self, number):
        self.rig.until(lambda: number in self.rig.stored or number in self.rig.fetched)

    def store(self, group, pairs, block=1):
        """Order to store blocks from ``block`` on."""
        self.number += 1
        for at, (name, _) in enumerate(pairs if block == 1 else (), 1):
            self.write_block(group, at, name)
        hashes, rows = tuple(name for name, _ in pairs), tuple(row for _, row in pairs)
        copies = RowCopies(group, tuple(range(block, block + len(rows))), rows)
        self.order(group, pairs, stores=(Store(self.number, copies, hashes),))

    def fetch(self, group, pairs):
        self.number += 1
        hashes, rows = tuple(name for name, _ in pairs), tuple(row for _, row in pairs)
        self.order(group, pairs, fetches=(TierFetch(self.number, "disk", group, hashes, rows),))

    def put(self, tier, group, name):
        """A tier has what is of this name."""
        pages = b"".join(page for region in content(self.device, group, name) for page in region)
        tier.kept[group, name] = pages.ljust(self.rig.worker.plan.row_class(group).row_bytes, b"\0")

    def wanted(self, num_tokens, start):
        """Positions by group of what token ``num_tokens`` sees."""
        first = {0: start, 1: max(start, num_tokens - 15), 2: start}
        return [
            (group, at)
            for group, size in BLOCK.items()
            for at in range(first[group] // size, -(-num_tokens // size))
        ]

    def has(self, prompt, num_tokens, start, count):
        """Whether all is there that a hit needs, and named."""
        return start < num_tokens <= 4 * count and all(
            (group, name_of(prompt, group, at)) in self.places and (at + 1) * BLOCK[group] <= 4 * count
            for group, at in self.wanted(num_tokens, start)
        )

    def check(self, prompt, most, start=0, count=TOKENS // 4):
        """What is found is as long as by hand, and can be held."""
        prefix = Prefix(NAMING, start, names(prompt, count))
        lengths = range(most // 8 * 8, start, -8)
        num_tokens = next((length for length in lengths if self.has(prompt, length, start, count)), 0)
        total_bytes = sum(
            sum(len(page) for pages in content(self.device, group, b"") for page in pages)
            for group, _ in (self.wanted(num_tokens, start) if num_tokens else ())
        )
        assert self.rows.find(prefix, most) == (num_tokens, total_bytes, 0, 0, 0.0)
        return self.hold(prompt, num_tokens, start, count)

    def hold(self, prompt, num_tokens, start=0, count=TOKENS // 4):
        """What is held, if all of it is there, has the bytes of its names."""
        kept = self.rows.hold(Prefix(NAMING, start, names(prompt, count)), num_tokens)
        assert (kept is not None) == self.has(prompt, num_tokens, start, count)
        if kept is not None:
            assert kept.is_intact()
            self.check_bytes(kept, prompt, num_tokens, start)
        return kept

    def check_names(self):
        """Every name that is known is where it was put last, and no other is remembered."""
        for group, places in self.rows._places.items():
            known = {
                (group, name) for name, is_known in zip(places, self.known(group), strict=True) if is_known
            }
            assert known == {what for what in self.places if what[0] == group}
            contents = self.rows._contents[self.rig.worker.plan.class_of[group]]
            assert all(contents[row] == (group, name) for name, (row, _) in places.items())

    def known(self, group):
        return self.rows._known(group, list(self.rows._places[group])).tolist()

    def check_bytes(self, kept, prompt, num_tokens, start):
        wanted = set(self.wanted(num_tokens, start))
        for blocks in kept.groups:
            group, ratio = blocks.group, 2 if blocks.group == 2 else 1
            regions = [region for region in self.table.regions if region.group == group]
            there = {(blocks.first_block + at) // ratio for at, page in enumerate(blocks.block_ids) if page}
            assert there == {at for one, at in wanted if one == group}
            for at, page in enumerate(blocks.block_ids):
                position, part = divmod(blocks.first_block + at, ratio)
                if not page:
                    continue
                true = content(self.device, group, name_of(prompt, group, position))
                for region, pages in zip(regions, true, strict=True):
                    assert 0 < page < region.num_blocks
                    address = region.address + page * region.block_stride
                    assert ctypes.string_at(address, region.page_bytes) == pages[part]


@pytest.fixture
def named():
    return Named()


def keep(named, prompt, num_tokens=TOKENS, groups=(0, 1, 2)):
    for group in groups:
        pairs = [(name_of(prompt, group, at), at) for at in range(num_tokens // BLOCK[group])]
        for part in range(0, len(pairs), 8):
            named.store(group, pairs[part : part + 8])
            named.placed(group, pairs[part : part + 8])


def test_nothing_has_a_name_once_the_weights_are_replaced(named):
    keep(named, "aaaaaa", 16)
    kept = named.check("aaaaaa", 16)
    named.rig.worker.replace_weights({"tensors": "others"})
    named.places = {}
    named.check("aaaaaa", 16)
    assert not kept.is_intact()
    keep(named, "aaaaaa", 16)
    assert named.check("aaaaaa", 16) is not None


@pytest.mark.parametrize("naming", [Naming("test", 8), Naming("other", 4)])
def test_nothing_is_kept_under_names_that_are_made_otherwise(named, naming):
    keep(named, "aaaaaa")
    prefix = Prefix(naming, 0, names("aaaaaa"))
    assert (named.rows.find(prefix, 48), named.rows.hold(prefix, 8)) == (NOTHING, None)


@pytest.mark.parametrize(
    ("start", "num_tokens"), [(0, 0), (0, 52), (0, 2**31), (16, 16), (16, 8), (2**31 - 1, 8)]
)
def test_no_more_is_held_than_what_is_named_and_wanted(named, start, num_tokens):
    keep(named, "aaaaaa")
    assert named.rows.hold(Prefix(NAMING, start, names("aaaaaa")), num_tokens) is None
    assert named.rows.hold(Prefix(NAMING, 0, ()), num_tokens) is None
    assert named.rows.find(Prefix(NAMING, start, ()), num_tokens) == NOTHING
    assert named.rows.hold(Prefix(NAMING, 0, names("aaaaaa", 7)), 28) is None, "half of a block has no name"


def test_a_fetch_from_before_a_clear_takes_no_name_from_what_was_kept_since():
    named = Named(tier := Double())
    tier.mood = "late"
    named.fetch(1, [(b"a", 0)])
    late = named.number
    named.rig.until(lambda: tier.put_off)
    named.rig.order(clear=True)
    named.store(1, [(b"a", 1)])
    named.placed(1, [(b"a", 1)])
    named.put(tier, 1, b"a")
    tier.release()
    named.until_reported(late)
    named.check_names()


def test_a_store_to_a_row_that_there_is_not_gives_no_name(named):
    keep(named, "aa", 16)
    named.store(0, [(b"x", 10**6)], block=1)
    named.rig.until_idle()
    assert named.rig.stored[named.number] == (b"x",)
    named.check_names()


def test_a_draft_layers_block_is_known_by_the_name_after_it():
    named = Named(drafts=(1,))
    keep(named, "aaaaaa", 40, groups=(0, 2))
    pairs = [(name_of("aaaaaa", 1, at + 1), at) for at in range(4)]
    named.store(1, pairs)
    named.placed(1, pairs)
    prefix = Prefix(NAMING, 0, names("aaaaaa"))
    assert named.rows.find(prefix, 32)[0] == 32
    kept = named.rows.hold(prefix, 32)
    assert [blocks.group for blocks in kept.groups] == [0, 1, 2]
    assert kept.groups[1].first_block == 2
    assert kept.groups[1].block_ids == (3, 4)
    # The block at the end has no name before the one after it has.
    assert named.rows.find(Prefix(NAMING, 0, names("aaaaaa", 8)), 48)[0] == 24


def test_names_must_divide_blocks():
    rig = Rig()
    needs = HitRequirements.of(caches()[0].groups, (0, 1, 2), 8)
    with pytest.raises(ConfigError, match="names are of 3"):
        rig.worker.name_rows(Naming("n", 3), needs)


PROMPTS = ["aaaaaa", "aabbbb", "aabbcc", "dddddd"]
prompts = st.sampled_from(PROMPTS)
NUM_ROWS = 18


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_is_ordered_no_name_stands_for_other_bytes(data):
    tier = Double()
    named = Named(tier)
    # A late fetch: what it reads, and rows that no other order has meanwhile.
    held, late, busy = [], None, set()
    draw = data.draw
    for _ in range(draw(st.integers(1, 25))):
        group, prompt = draw(st.sampled_from([0, 0, 1, 2])), draw(prompts)
        first = draw(st.integers(0, TOKENS // BLOCK[group] - 1))
        at = range(first, min(TOKENS // BLOCK[group], first + draw(st.integers(1, 8))))
        free = [
            row for row in range(draw(st.integers(0, 9)), NUM_ROWS) if named.row_of(group, row) not in busy
        ]
        pairs = list(zip((name_of(prompt, group, position) for position in at), free, strict=False))
        what = draw(st.sampled_from(["store", "store", "store", "fail", "keep", "fetch", "clear", "check"]))
        rows, touched = {named.row_of(group, row) for _, row in pairs}, set()
        if what in ("store", "fail"):
            # There is no such block.
            named.store(group, pairs, block=1 if what == "store" else 10**6)
            touched = rows
        elif what == "keep":
            for name, _ in pairs:
                named.put(tier, group, name)
        elif what == "fetch" and late is None:
            tier.mood = draw(st.sampled_from(["good", "refuse", "late", "late"]))
            named.fetch(group, pairs)
            touched = rows
            if tier.mood == "late":
                late, busy = (group, pairs, named.number), rows
                named.rig.until(lambda: tier.put_off)
        elif what == "fetch":
            read_group, read, number = late
            there = [(name, row) for name, row in read if (read_group, name) in tier.kept]
            tier.release()
            named.placed(read_group, there, number)
            late, busy = None, set()
        elif what == "clear" and draw(st.integers(0, 3)) == 0:
            named.rig.order(clear=True)
            done = threading.Event()
            named.rig.worker._loop.order(lambda _, done=done: done.set())
            assert done.wait(10)
            named.places = {}
            touched = set().union(*(kept_rows for _, kept_rows in held))
            late = late and (late[0], [], late[2])
        # At once, before any thread has done what was ordered. A content that is put elsewhere, too, leaves
        # the row that had it as it is.
        assert [kept.is_intact() for kept, _ in held] == [not kept_rows & touched for _, kept_rows in held]
        if what == "store":
            named.placed(group, pairs)
        elif what == "fail" or (touched and what == "fetch" and late is None):
            is_read = what == "fetch" and tier.mood == "good"
            named.placed(group, [pair for pair in pairs if is_read and (group, pair[0]) in tier.kept])
        named.check_names()
        held = [(kept, kept_rows) for kept, kept_rows in held if not kept_rows & touched]
        start, count = draw(st.sampled_from([0, 0, 4, 8, 16])), draw(st.sampled_from([12, 12, 7, 0]))
        named.check(prompt, draw(st.integers(0, TOKENS + 8)), start, count)
        # A peer may cut what it fetches anywhere, and may ask for what there never was.
        num_tokens = draw(st.one_of(st.integers(0, TOKENS + 8), st.just(2**31)))
        if (kept := named.hold(prompt, num_tokens, start, count)) is not None:
            wanted = named.wanted(num_tokens, start)
            held.append(
                (kept, {named.places[one, name_of(prompt, one, position)] for one, position in wanted})
            )
        for naming in (Naming("test", 8), Naming("other", 4)):
            odd = Prefix(naming, start, names(prompt))
            assert (named.rows.find(odd, TOKENS), named.rows.hold(odd, 8)) == (NOTHING, None)
    for each in PROMPTS:
        named.check(each, TOKENS)
    tier.release()
    named.rig.close()


class Lending(Named):
    """A model of what is on disk beside that of host memory; every job for peers is looked at."""

    def __init__(self, **given):
        self.tier = Double()
        super().__init__(self.tier, peer_share=0.3, **given)
        self.work = self.rig.worker._loop
        self.work.disk_bytes_per_s = 1e6
        ask = self.work.ask

        def look(kind, job, name, now):
            if job.key is None:
                rows = self.rig.worker.plan.row_class(job.copies.group)
                assert all(rows.num_rows <= row < rows.num_all for row in job.copies.rows)
                self.read += len(job.hashes)
            ask(kind, job, name, now)

        self.work.ask, self.read = look, 0

    def write(self, prompt, num_tokens=TOKENS, groups=(0, 1, 2)):
        """Put a prompt on disk."""
        for group in groups:
            for at in range(num_tokens // BLOCK[group]):
                self.put(self.tier, group, name_of(prompt, group, at))

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
    return Lending()


def test_what_is_on_disk_is_offered_read_once_and_held(lending):
    lending.write("aaaaaa")
    assert lending.find("aaaaaa")[:3] == (0, 0, TOKENS)
    assert lending.find("aaaaaa")[4] > 0
    lending.tier.mood = "late"
    both = [lending.hold("aaaaaa") for _ in range(2)]
    lending.rig.until(lambda: len(lending.tier.put_off) == 3)
    assert not any(kept.is_ready() for kept in both)
    lending.tier.release()
    for kept in both:
        lending.until_read(kept)
        assert kept.is_intact()
        lending.check_bytes(kept, "aaaaaa", TOKENS, 0)
    assert lending.read == 12 + 2 + 6, "of the window what the next token sees"
    # Another fetch of the same has the same rows, nothing is read again.
    assert lending.hold("aaaaaa").is_ready()
    assert lending.read == 20
    assert lending.find("aaaaaa") == (*lending.find("aaaaaa")[:2], 0, 0, 0.0)


def test_rows_in_use_are_not_lent_again_and_are_free_once_they_are_let_go(lending):
    for prompt in ("aaaaaa", "bbbbbb", "cccccc", "dddddd"):
        lending.write(prompt)
    kept = lending.hold("aaaaaa")
    lending.until_read(kept)
    with pytest.raises(PeerError, match="in use"):
        lending.hold("dddddd")
    assert lending.find("dddddd")[2] == 0, "what cannot be read now is not offered"
    assert kept.is_intact()
    lending.check_bytes(kept, "aaaaaa", TOKENS, 0)
    del kept
    assert lending.find("dddddd")[2] == TOKENS
    assert lending.hold("dddddd") is not None


@pytest.mark.parametrize("what", ["gone", "clear", "weights"])
def test_what_is_not_read_after_all_is_not_intact(lending, what):
    lending.write("aaaaaa")
    lending.tier.mood = "late"
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


def test_a_peers_fetch_does_not_wait_for_a_disk_that_hangs_and_its_rows_are_not_lent_again(
    lending, monkeypatch
):
    lending.write("aaaaaa")
    lending.tier.mood = "late"
    monkeypatch.setattr(tier_loop, "PEER_READ_TIMEOUT_S", 0.01)
    kept = lending.hold("aaaaaa")
    lending.rig.until(lambda: lending.rig.failures("disk_read_timeout") == 3)
    assert not kept.is_intact(), "the fetch is refused"
    kept = None
    lending.tier.mood = "good"
    assert lending.find("aaaaaa")[2] < TOKENS
    with pytest.raises(PeerError, match="in use"):
        lending.hold("aaaaaa")
    lending.tier.release()
    lending.rig.until_idle()
    assert lending.find("aaaaaa")[:3] == (0, 0, TOKENS), "what came too late has no name"
    kept = lending.hold("aaaaaa")
    lending.until_read(kept)
    assert kept.is_intact()
    lending.check_bytes(kept, "aaaaaa", TOKENS, 0)


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
                lending.rig.worker._loop.order(lambda _, done=done: done.set())
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
