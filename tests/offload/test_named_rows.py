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


class Named:
    """A rig whose rows have names, and a model of it: which name is where, as far as it is certain."""

    def __init__(self, *tiers, drafts=(), **settings):
        self.rig = Rig(*tiers, **settings)
        self.config = caches()[0]
        self.needs = HitRequirements.of(self.config.groups, (0, 1, 2), 8, drafts)
        self.rig.worker.name_rows(NAMING, self.needs)
        self.rows = self.rig.worker.names
        self.device, self.table = self.rig.table, self.rows.table
        self.places, self.number = {}, 0
        classes = self.rig.worker.plan.class_of
        self.row_of = lambda group, row: (classes[group], row)

    def write_block(self, group, block, name):
        geometry = self.device.geometry()[group]
        regions = [region for region in self.device.regions if region.group == group]
        for region, pages in zip(regions, content(self.device, group, name), strict=True):
            for part, page in enumerate(pages):
                at = block * geometry.blocks_per_kv_block + part
                ctypes.memmove(region.address + at * region.block_stride, page, len(page))

    def taken(self, group, rows):
        gone = {self.row_of(group, row) for row in rows}
        self.places = {what: row for what, row in self.places.items() if row not in gone}

    def store(self, group, pairs, wait=True):
        """``pairs`` are of name and row."""
        self.number += 1
        for block, (name, _) in enumerate(pairs, 1):
            self.write_block(group, block, name)
        hashes, rows = tuple(name for name, _ in pairs), tuple(row for _, row in pairs)
        self.taken(group, rows)
        self.rig.order(
            stores=(Store(self.number, RowCopies(group, tuple(range(1, len(rows) + 1)), rows), hashes),)
        )
        if wait:
            self.rig.until_idle()
            self.places.update(((group, name), self.row_of(group, row)) for name, row in pairs)

    def fetch(self, group, pairs, tier):
        self.number += 1
        hashes, rows = tuple(name for name, _ in pairs), tuple(row for _, row in pairs)
        self.taken(group, rows)
        self.rig.order(fetches=(TierFetch(self.number, "disk", group, hashes, rows),))
        if tier.mood in ("good", "refuse"):
            self.rig.until_idle()
            there = [(name, row) for name, row in pairs if (group, name) in tier.kept]
            if tier.mood == "good":
                self.places.update(((group, name), self.row_of(group, row)) for name, row in there)

    def put(self, tier, group, name):
        """A tier has what is of this name."""
        pages = b"".join(page for region in content(self.device, group, name) for page in region)
        tier.kept[group, name] = pages.ljust(self.rig.worker.plan.row_class(group).row_bytes, b"\0")

    def found_by_hand(self, prompt, most, start=0, count=TOKENS // 4):
        for num_tokens in range(most // 8 * 8, start, -8):
            wanted = self.wanted(num_tokens, start)
            if num_tokens > count * 4:
                continue
            if all((group, name_of(prompt, group, at)) in self.places for group, at in wanted):
                return num_tokens
        return 0

    def wanted(self, num_tokens, start):
        """Positions by group of what token ``num_tokens`` sees."""
        first = {0: start, 1: max(start, num_tokens - 15), 2: start}
        return [
            (group, at)
            for group, size in BLOCK.items()
            for at in range(first[group] // size, num_tokens // size)
        ]

    def check(self, prompt, most, start=0):
        """What is found is as long as by hand, and holds the bytes of its names."""
        prefix = Prefix(NAMING, start, names(prompt))
        num_tokens, total_bytes, *_ = self.rows.find(prefix, most)
        assert num_tokens == self.found_by_hand(prompt, most, start)
        if not num_tokens:
            assert total_bytes == 0
            return None
        assert total_bytes == sum(
            sum(len(page) for pages in content(self.device, group, b"") for page in pages)
            for group, _ in self.wanted(num_tokens, start)
        )
        kept = self.rows.hold(prefix, num_tokens)
        assert kept.is_intact()
        self.check_bytes(kept, prompt, num_tokens, start)
        return kept

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


def keep(named, prompt, num_tokens=TOKENS, first_row=0, groups=(0, 1, 2)):
    for group in groups:
        count = num_tokens // BLOCK[group]
        pairs = [(name_of(prompt, group, at), first_row + at) for at in range(count)]
        for part in range(0, count, 8):
            named.store(group, pairs[part : part + 8])


def test_what_was_stored_is_found_by_its_names(named):
    keep(named, "aaaaaa", 40)
    assert named.check("aaaaaa", 100) is not None
    assert named.rows.find(Prefix(NAMING, 0, names("aaaaaa")), 100)[0] == 40
    assert named.rows.find(Prefix(NAMING, 0, names("aaaaaa")), 39)[0] == 32
    assert named.rows.find(Prefix(NAMING, 0, names("aaaaaa", 7)), 100)[0] == 24
    for start in (4, 8, 20, 36, 40, 44):
        named.check("aaaaaa", 100, start)
    assert named.rows.find(Prefix(NAMING, 0, names("aabbbb")), 100)[0] == 16
    assert named.rows.find(Prefix(NAMING, 0, names("bbbbbb")), 100) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("naming", [Naming("test", 8), Naming("other", 4)])
def test_nothing_is_kept_under_names_that_are_made_otherwise(named, naming):
    keep(named, "aaaaaa")
    prefix = Prefix(naming, 0, names("aaaaaa"))
    assert named.rows.find(prefix, 48) == (0, 0, 0, 0, 0)
    assert named.rows.hold(prefix, 8) is None


@pytest.mark.parametrize(
    ("start", "num_tokens"), [(0, 0), (0, 52), (0, 2**31), (16, 16), (16, 8), (2**31 - 1, 8)]
)
def test_no_more_is_held_than_what_is_named_and_wanted(named, start, num_tokens):
    keep(named, "aaaaaa")
    assert named.rows.hold(Prefix(NAMING, start, names("aaaaaa")), num_tokens) is None
    assert named.rows.hold(Prefix(NAMING, 0, ()), num_tokens) is None
    assert named.rows.find(Prefix(NAMING, start, ()), num_tokens) == (0, 0, 0, 0, 0)


def test_a_prefix_is_held_where_a_peer_cuts_it_shorter(named):
    # Its blocks are others: a window and the blocks that see all are known from any token on.
    keep(named, "aaaaaa")
    prefix = Prefix(NAMING, 0, names("aaaaaa"))
    for num_tokens in range(1, TOKENS + 1):
        kept = named.rows.hold(prefix, num_tokens)
        first = max(0, num_tokens - 15) // 8
        assert kept.groups[1].first_block == first
        assert len(kept.groups[1].block_ids) == -(-num_tokens // 8) - first


def test_a_row_that_is_taken_has_no_name_from_that_moment_on(named):
    keep(named, "aaaaaa", 16)
    kept = named.check("aaaaaa", 16)
    named.store(0, [(b"x", 2)], wait=False)
    assert not kept.is_intact()
    assert named.rows.find(Prefix(NAMING, 0, names("aaaaaa")), 16)[0] == 8
    named.rig.until_idle()
    assert not kept.is_intact()
    # The same content in the same row is another one.
    named.store(0, [(name_of("aaaaaa", 0, 2), 2)])
    assert not kept.is_intact()
    assert named.check("aaaaaa", 16).is_intact()


def test_a_content_that_is_stored_twice_is_where_it_was_stored_last(named):
    keep(named, "aa", 16)
    named.store(0, [(name_of("aa", 0, 3), 9)])
    named.store(0, [(b"x", 3)])
    named.check("aa", 16)
    assert named.rows.find(Prefix(NAMING, 0, names("aa")), 16)[0] == 16


def test_former_names_of_a_row_are_not_remembered(named):
    for number in range(20):
        named.store(0, [(b"%d" % number, 2), (b"%d again" % number, 3)])
    assert list(named.rows._places[0]) == [b"19", b"19 again"]


@pytest.mark.parametrize("forget", ["clear", "weights"])
def test_nothing_has_a_name_after_the_cache_was_reset(named, forget):
    keep(named, "aaaaaa", 16)
    kept = named.check("aaaaaa", 16)
    if forget == "clear":
        named.rig.order(clear=True)
    else:
        named.rig.worker.replace_weights({"tensors": "others"})
    named.places = {}
    named.check("aaaaaa", 16)
    assert not kept.is_intact()
    keep(named, "aaaaaa", 16)
    assert named.check("aaaaaa", 16) is not None


@pytest.mark.parametrize(("block", "row"), [(10**6, 1), (1, 10**6)])
def test_a_copy_that_failed_gives_no_name(named, block, row):
    keep(named, "aa", 16)
    hashes = (b"x",)
    # There is no such block, or no such row.
    named.rig.order(stores=(Store(77, RowCopies(0, (block,), (row,)), hashes),))
    named.rig.until_idle()
    assert named.rig.stored[77] == hashes
    named.taken(0, (row,))
    named.check("aa", 16)
    assert not any(b"x" in places for places in named.rows._places.values())


def test_what_a_tier_reads_has_its_name_once_it_is_there():
    tier = Double()
    named = Named(tier)
    keep(named, "aaaa", 32, groups=(1, 2))
    for at in (0, 1, 2, 3, 4, 6, 7):
        named.put(tier, 0, name_of("aaaa", 0, at))
    pairs = [(name_of("aaaa", 0, at), 20 + at) for at in range(8)]
    tier.mood = "late"
    named.fetch(0, pairs, tier)
    named.check("aaaa", 32)
    tier.mood = "good"
    tier.release()
    named.rig.until_idle()
    # The sixth is not there.
    named.places.update(((0, name), named.row_of(0, row)) for name, row in pairs if (0, name) in tier.kept)
    assert named.check("aaaa", 32) is not None
    assert named.rows.find(Prefix(NAMING, 0, names("aaaa")), 32)[0] == 16


def test_a_row_that_is_being_read_into_has_no_name():
    tier = Double(mood="late")
    named = Named(tier)
    keep(named, "aa", 16)
    kept = named.check("aa", 16)
    tier.kept[0, b"x"] = bytes(named.rig.worker.plan.row_class(0).row_bytes)
    named.fetch(0, [(b"x", 1)], tier)
    named.rig.until(lambda: tier.put_off)
    assert not kept.is_intact()
    named.check("aa", 16)
    tier.release()
    named.rig.until_idle()
    named.check("aa", 16)
    named.store(0, [(name_of("aa", 0, 1), 1)])
    assert named.check("aa", 16) is not None


def test_a_draft_layers_block_is_known_by_the_name_after_it():
    named = Named(drafts=(1,))
    keep(named, "aaaaaa", 40, groups=(0, 2))
    for at in range(4):
        named.store(1, [(name_of("aaaaaa", 1, at + 1), at)])
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


prompts = st.sampled_from(["aaaaaa", "aabbbb", "aabbcc", "dddddd"])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_is_ordered_no_name_stands_for_other_bytes(data):
    tier = Double()
    named = Named(tier)
    held = []
    for _ in range(data.draw(st.integers(1, 25))):
        group = data.draw(st.sampled_from([0, 0, 1, 2]))
        prompt = data.draw(prompts)
        first = data.draw(st.integers(0, TOKENS // BLOCK[group] - 1))
        at = range(first, min(TOKENS // BLOCK[group], first + data.draw(st.integers(1, 8))))
        row = data.draw(st.integers(0, 9))
        pairs = [(name_of(prompt, group, position), row + index) for index, position in enumerate(at)]
        what = data.draw(st.sampled_from(["store", "store", "store", "keep", "fetch", "clear", "check"]))
        touched = set()
        if what in ("store", "fetch"):
            touched = {named.row_of(group, row) for _, row in pairs}
        if what == "store":
            named.store(group, pairs)
        elif what == "keep":
            for name, _ in pairs:
                named.put(tier, group, name)
        elif what == "fetch":
            tier.mood = data.draw(st.sampled_from(["good", "good", "refuse"]))
            named.fetch(group, pairs, tier)
        elif what == "clear" and data.draw(st.integers(0, 3)) == 0:
            named.rig.order(clear=True)
            named.rig.until_idle()
            tier.kept, named.places = {}, {}
            touched = set().union(*(rows for _, rows in held))
        # A content that is put elsewhere, too, leaves the row that had it as it is.
        for kept, rows in held:
            assert kept.is_intact() == (not rows & touched)
        held = [(kept, rows) for kept, rows in held if kept.is_intact()]
        start = data.draw(st.sampled_from([0, 0, 4, 8, 16]))
        most = data.draw(st.integers(0, TOKENS + 8))
        kept = named.check(prompt, most, start)
        if kept is not None:
            num_tokens = named.rows.find(Prefix(NAMING, start, names(prompt)), most)[0]
            wanted = named.wanted(num_tokens, start)
            rows = {named.places[one, name_of(prompt, one, position)] for one, position in wanted}
            held.append((kept, rows))
    for each in ("aaaaaa", "aabbbb", "aabbcc", "dddddd"):
        named.check(each, TOKENS)
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
