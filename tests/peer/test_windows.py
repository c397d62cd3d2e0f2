"""Whether the block that a window begins in is full once it was loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvconnect.cache.region_table import GroupGeometry, RegionTable
from kvconnect.cache.retention import FULL, Chunked, Window
from kvconnect.peer.agreement import fills_windows


def card(tokens, ratio=1, rule=FULL):
    return SimpleNamespace(table=RegionTable((), (GroupGeometry(0, tokens, ratio, rule.text),)))


@pytest.mark.parametrize("rule", [Window(12), Chunked(64)])
@pytest.mark.parametrize(
    ("theirs", "ours", "is_full"),
    [((16,), (16,), True), ((8, 2), (16,), True), ((32,), (16,), True), ((8,), (8, 2), False)],
)
def test_a_window_begins_in_a_full_block_where_blocks_of_the_peer_end_with_ours(rule, theirs, ours, is_full):
    assert fills_windows(card(*theirs, rule=rule), card(*ours, rule=rule)) is is_full


def test_what_sees_all_tokens_is_full_whatever_the_peer_has():
    assert fills_windows(card(4), card(64))
