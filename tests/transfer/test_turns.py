"""What is at rest costs a turn, and a step of the scheduler halves, nothing: calls of Python are counted."""

from __future__ import annotations

import gc
import sys
from collections import Counter

import pytest

from benchmarks.turns import RESTING


def calls_of(turn) -> Counter:
    """What is called in a turn, how often; the second one, when all is warm."""
    called: Counter = Counter()

    def count(frame, event, argument) -> None:
        if event == "call":
            called[frame.f_code.co_filename, frame.f_code.co_name] += 1
        elif event == "c_call":
            called[argument.__qualname__] += 1

    turn()
    # A collection runs when it likes, and hypothesis has a hook in it.
    gc.disable()
    sys.setprofile(count)
    try:
        turn()
    finally:
        sys.setprofile(None)
        gc.enable()
    return called


@pytest.mark.parametrize("what", RESTING)
def test_a_turn_calls_as_much_with_300_records_at_rest_as_with_3(what):
    few, many = (calls_of(RESTING[what](count)) for count in (3, 300))
    assert many == few
    assert few.total() > 0
