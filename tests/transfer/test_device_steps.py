"""An order waits for the step that it speaks of: no less, and no later one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvconnect.transfer.parts import _KEPT, DeviceSteps


class Stream:
    """Kernels in order, of which so many have run."""

    def __init__(self):
        self.launched, self.ran = 0, 0

    def record(self):
        number = self.launched
        return lambda: self.ran >= number


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.sampled_from([(), (1,), (7, 11)]), st.data())
def test_a_step_is_over_with_the_last_of_its_kernels(kernels, earlier, data):
    """Also where the steps of another scheduler half were counted before."""
    stream = Stream()
    steps, ends = DeviceSteps(stream.record), {}
    for step in earlier:
        steps.begin(step)
        stream.launched += 1
    for step, count in enumerate(kernels, 1):
        steps.begin(step)
        stream.launched += count
        ends[step] = stream.launched
    step = data.draw(st.integers(1, len(kernels)))
    is_finished = steps.finished(step)
    # Of a step so long ago that its end is forgotten, that of a later one counts.
    end = ends[max(step, len(kernels) - _KEPT)]
    stream.launched += 5
    for ran in range(stream.launched + 1):
        stream.ran = ran
        assert is_finished() == (ran >= end)
