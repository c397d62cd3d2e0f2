"""An idle vLLM steps until what is on disk was told, and not for ever."""

from __future__ import annotations

import time

from kvconnect.offload.disk.row_files import RowFiles
from kvconnect.transfer.orders import OffloadReport, TierChange
from kvconnect.vllm.steps import WAIT_S, Recovery
from tests.offload.disk_kit import open_driver, open_tier
from tests.offload.tier_suite import some_rows
from tests.offload.worker_kit import Rig

NEWS = [OffloadReport(0), OffloadReport(1, changes=(TierChange("disk", 0, (b"h",)),))]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_it_steps_while_more_is_told_and_then_no_more():
    recovery = Recovery(expects=True, clock=Clock())
    for _ in range(3):
        assert recovery.is_under_way
        recovery.step()
        recovery.reported(NEWS)
    assert recovery.is_under_way
    recovery.step()
    assert not recovery.is_under_way, "a step that brought nothing is the last"
    recovery.step()
    recovery.reported(NEWS)
    assert recovery.is_under_way, "what changes later is heard in the same way"


def test_it_steps_until_a_disk_that_is_slower_than_steps_has_reported_all(tmp_path, monkeypatch):
    rows = some_rows(700, 1, length=9)
    before = open_driver(tmp_path)
    assert before.write(rows) == ()
    before.tier.close()
    monkeypatch.setattr(RowFiles, "read_footer", lambda *_: time.sleep(2e-4) or b"f")
    rig = Rig(open_tier(tmp_path, reads_footers=True))
    recovery = Recovery(expects=True, clock=time.monotonic)
    found = set()
    while recovery.is_under_way:
        recovery.step()
        reports = rig.worker.results().offload
        recovery.reported(reports)
        found.update(name for report in reports for change in report.changes for name in change.added)
        time.sleep(1e-3)
    rig.worker.close()
    assert found == {name for _, name in rows}


def test_where_nothing_is_told_it_waits_for_a_while():
    clock = Clock()
    recovery = Recovery(expects=True, clock=clock)
    assert recovery.is_under_way
    clock.now += WAIT_S - 0.1
    recovery.step()
    recovery.reported([OffloadReport(0), OffloadReport(1, is_recovering=True)])
    assert recovery.is_under_way
    clock.now += 0.2
    assert not recovery.is_under_way
    clock.now -= 1.0
    assert not recovery.is_under_way


def test_without_lower_tiers_it_waits_for_nothing():
    assert not Recovery(expects=False, clock=Clock()).is_under_way
