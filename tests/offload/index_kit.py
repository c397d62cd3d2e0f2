"""What must always be true of an index of host memory."""

from __future__ import annotations

import numpy as np

from kvconnect.offload.index.class_rows import ABSENT, PENDING, READY
from kvconnect.offload.index.tier_index import TierIndex


def check_index(index: TierIndex) -> None:
    """Rows are each free or held once, contents are found where they are, and ages are of what may go."""
    for rows in index.classes:
        held = np.flatnonzero(rows.state)
        assert sorted([*rows.free, *held.tolist()]) == list(range(rows.num_rows))
        for row, group in zip(held.tolist(), rows.group[held].tolist(), strict=True):
            content = rows.hash[row]
            assert rows.row_of[group].get(content) == row
        is_pinned = rows.pins > 0
        assert not (rows.pins < 0).any()
        assert not np.isin(rows.state[is_pinned], (ABSENT, PENDING)).any()
        assert not rows.is_session_pinned[np.flatnonzero(rows.state == ABSENT)].any()
        aging = np.flatnonzero((rows.state == READY) & ~is_pinned & ~rows.is_session_pinned)
        assert sorted(rows.ages.rows().tolist()) == aging.tolist()
        assert all(len(row_of) <= rows.num_rows for row_of in rows.row_of.values())
