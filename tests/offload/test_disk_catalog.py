"""The catalog against a model that keeps plain lists."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnect.errors import LocalError
from kvconnect.offload.disk.catalog import Catalog, Place, Segment
from kvconnect.offload.disk.files import bytes_on_disk

LIMIT = bytes_on_disk(10_000) * 4
CONTENTS = st.tuples(st.just(0), st.sampled_from([b"a", b"b", b"c"]))


class CatalogMachine(RuleBasedStateMachine):
    """The model: where each content is, and which segments there are."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog(LIMIT)
        self.segments: dict[int, tuple[Segment, int]] = {}
        self.places: dict[tuple[int, bytes], Place] = {}
        self.told: set[tuple[int, bytes]] = set()
        self.last = 0

    @rule(length=st.integers(1, 10_000))
    def begin(self, length):
        if not self.catalog.room_for(length):
            with pytest.raises(LocalError):
                self.catalog.begin(length)
            return
        segment, epoch = self.catalog.begin(length), self.catalog.epoch
        assert segment.number == self.last + 1
        self.last = segment.number
        self.segments[segment.number] = (segment, epoch)

    @precondition(lambda self: self.segments)
    @rule(
        data=st.data(),
        contents=st.lists(CONTENTS, min_size=1, max_size=3, unique=True),
        is_of_before=st.booleans(),
    )
    def commit(self, data, contents, is_of_before):
        number = data.draw(st.sampled_from(sorted(self.segments)))
        segment, epoch = self.segments[number]
        start = segment.length_bytes
        if is_of_before:
            self.catalog.commit(segment, epoch - 1, [(content, start) for content in contents], start + 10)
            assert segment.length_bytes == start
            return
        entries = [(content, start + index * 10) for index, content in enumerate(contents)]
        self.catalog.commit(segment, epoch, entries, start + 10 * len(contents))
        for content, offset in entries:
            self.places[content] = max(self.places.get(content, Place(0, 0)), Place(number, offset))

    @rule(contents=st.lists(CONTENTS, max_size=6))
    def locate(self, contents):
        assert self.catalog.locate(contents) == [self.places.get(content) for content in contents]
        assert self.catalog.has(contents) == [content in self.places for content in contents]

    @rule(content=CONTENTS, is_right=st.booleans())
    def drop(self, content, is_right):
        place = self.places.get(content, Place(1, 0))
        if is_right:
            self.places.pop(content, None)
        else:
            place = Place(place.segment, place.offset + 1)
        self.catalog.drop([(content, place)])

    @precondition(lambda self: self.segments)
    @rule(data=st.data(), is_doomed=st.booleans())
    def seal(self, data, is_doomed):
        number = data.draw(st.sampled_from(sorted(self.segments)))
        segment, _epoch = self.segments[number]
        self.catalog.seal(segment, segment.length_bytes)
        assert segment.reserved_bytes == bytes_on_disk(segment.length_bytes)
        if is_doomed:
            del self.segments[number]
            self.places = {
                content: place for content, place in self.places.items() if place.segment != number
            }
            self.catalog.doom(segment)

    @rule()
    def remove_doomed(self):
        for segment in self.catalog.doomed():
            self.catalog.gone(segment)
        assert not self.catalog.doomed()

    @rule()
    def clear(self):
        late = list(self.segments.values())
        self.catalog.clear()
        self.segments.clear()
        self.places.clear()
        self.told.clear()
        for segment, epoch in late:
            self.catalog.commit(segment, epoch, [((0, b"a"), 0)], 10)

    @rule()
    def take_changes(self):
        added, removed = self.catalog.take_changes()
        assert not set(added) & set(removed)
        self.told = (self.told | set(added)) - set(removed)
        assert self.told == set(self.places)

    @invariant()
    def agrees(self):
        self.catalog.check()
        assert len(self.catalog) == len(self.places)
        assert [segment.number for segment in self.catalog.segments()] == sorted(self.segments)


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_what_was_read_survives_and_only_that():
    catalog = Catalog(1 << 20)
    first, epoch = catalog.begin(1000), catalog.epoch
    catalog.commit(first, epoch, [((0, b"a"), 0), ((0, b"b"), 100), ((0, b"c"), 200)], 300)
    catalog.locate([(0, b"c"), (0, b"a"), (0, b"x")])
    second = catalog.begin(1000)
    catalog.commit(second, epoch, [((0, b"a"), 0)], 100)
    assert catalog.survivors(first) == [((0, b"c"), 200)]
    assert catalog.oldest() is None
    catalog.seal(first, 300)
    assert catalog.oldest() is first
    catalog.drop([((0, b"c"), Place(1, 200))])
    assert catalog.survivors(first) == []
