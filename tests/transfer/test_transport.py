"""What carries bytes between two workers: found when they meet, reported once, and refused by settings."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise

import pytest

from kvconnect.config import ExtraConfig
from kvconnect.engine.base import Completion
from kvconnect.engine.lanes import Fabric, Traffic, Transport
from kvconnect.metrics import Metrics
from kvconnect.peer.messages import Fetch
from kvconnect.prefill.calibration import LinkMeter, ProbeOutbox
from kvconnect.transfer.duplicate_filter import DuplicateFilter
from kvconnect.transfer.link_reports import Transports, refusal
from tests.engine.faulty_engine import FaultyEngine
from tests.transfer.pair import SLOT_BYTES, Clock, Pair

MIB = 1 << 20
SCRATCH_BYTES = 8 * SLOT_BYTES


class LinkEngine(FaultyEngine):
    """The double as an engine that names a lane, and takes so long for every batch."""

    def __init__(self, words: str, seconds: float, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.capabilities = replace(self.capabilities, carries=Transport(*words.split("/")))
        self.seconds = seconds

    def start_at(self, flight) -> float:
        return max(super().start_at(flight), flight.submitted_at + self.seconds)


class LinkedPair(Pair):
    """A pair over a lane, with memory to calibrate it; ``eth7`` has a megabit a second."""

    def __init__(self, words="tcp", seconds=0.05, *, prefill=None, decode=None) -> None:
        self.words, self.seconds = words, seconds
        on_decode, on_prefill = (ExtraConfig(**(given or {})) for given in (decode, prefill))
        super().__init__(on_decode, prefill_config=on_prefill, scratch_bytes=SCRATCH_BYTES)
        self.prefill.local.fabric = Fabric(speeds={"eth7": 1})

    def engine(self) -> LinkEngine:
        return LinkEngine(self.words, self.seconds, self.clock)

    def run(self, seconds: float = 0.0, step_s: float = 0.05) -> None:
        """No step is longer than a batch takes: each would be measured as that long."""
        super().run(seconds, step_s)

    def request(self, name: str, seconds: float = 2.0) -> None:
        self.start(name)
        self.run(seconds)


def lines(caplog, words: str, level: int) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == level and words in one.getMessage()]


def test_both_sides_say_once_what_carries_the_bytes_and_count_them_by_it(caplog):
    caplog.set_level(logging.INFO)
    pair = LinkedPair("tcp/eth7")
    for name in "abc":
        pair.request(name, 3)
        assert pair.landed()
    assert pair.decode.received == list("abc")
    (found,) = pair.network.heard(Transport)
    assert (found.lane, found.device, found.known_by) == ("tcp", "eth7", "")
    assert found.bytes_per_s == pytest.approx(SCRATCH_BYTES / 0.05)
    shown = lines(
        caplog, "tcp (eth7), at 0.000164 GB/s, 131% of the 0.000125 that it should give", logging.INFO
    )
    assert len(shown) == 2
    assert any("rank 0 of decode node D" in line for line in shown)
    assert any("rank 0 of prefill node P" in line for line in shown)
    for worker, direction in ((pair.prefill, "sent"), (pair.decode, "received")):
        moved = worker.count("transfer_bytes", direction=direction)
        assert moved == worker.count("transfer_bytes", direction=direction, lane="tcp") > 0
        assert worker.metrics.link_rate.labels("tcp").value == found.bytes_per_s
        assert worker.count("failures") == 0
    pair.assert_idle()


@pytest.mark.parametrize(("seconds", "is_slow"), [(0.08, False), (0.18, True)])
def test_a_slow_link_is_warned_of_once_and_counted(caplog, seconds, is_slow):
    pair = LinkedPair("tcp/eth7", seconds)
    for name in "abc":
        pair.request(name, 4)
    assert pair.decode.received == list("abc")
    # A greeting more, and with it a calibration.
    pair.decode.transfers.decode.peers.greet_anew()
    pair.request("d", 4)
    assert len(pair.network.heard(Transport)) == 2
    for worker in (pair.prefill, pair.decode):
        assert worker.count("failures", reason="slow_link") == is_slow
    assert len(lines(caplog, "is slow: tcp (eth7), at 4.1e-05 GB/s, 33%", logging.WARNING)) == 2 * is_slow


REFUSALS = {
    "require_lane": ({"require_lane": "rdma,nvlink"}, "require_lane is 'rdma,nvlink'"),
    "min_gb_per_s": ({"min_gb_per_s": 1e-3}, "min_gb_per_s is 0.001"),
}


@pytest.mark.parametrize("side", ["P", "D"])
@pytest.mark.parametrize("setting", REFUSALS)
def test_a_peer_that_is_reached_otherwise_is_refused_by_name_and_asked_at_the_breakers_pace(setting, side):
    setting, words = REFUSALS[setting]
    pair = LinkedPair(prefill=setting) if side == "P" else LinkedPair(decode=setting)
    pair.request("a")
    assert "its lane is tcp, at 0.000164 GB/s" in pair.decode.failed["a"]
    assert words in pair.decode.failed["a"]
    assert ("the prefill node's kv_connector_extra_config" in pair.decode.failed["a"]) == (side == "P")
    assert not pair.landed()
    assert pair.prefill.count("transfers", outcome="refused") == (side == "P"), "it does not rely on D"
    assert pair.prefill.count("transfer_bytes") == 0
    assert pair.prefill.sent == ["a"], "what it held is free"
    assert len(pair.network.heard(Fetch)) == 1
    for number in range(200):
        pair.request(f"b{number}", 0.3)
    pair.run(10)
    # Doubling from a quarter of a second up to ten. Those that come during a calibration wait for it.
    assert 8 <= len(pair.network.heard(Transport)) <= 16
    assert len(pair.network.heard(Fetch)) <= 40
    assert all(words in pair.decode.failed[f"b{number}"] for number in range(200))
    assert pair.decode.count("failures", reason="transport_refused") == 201
    assert pair.decode.count("failures") == 201 + pair.decode.count("failures", reason="slow_link")
    assert pair.decode.count("transfer_bytes") == 0
    pair.assert_idle()


@pytest.mark.parametrize("side", ["P", "D"])
def test_a_peer_whose_calibration_was_disturbed_is_refused_for_a_while_only(side):
    setting = {"min_gb_per_s": 1e-4}
    pair = LinkedPair(prefill=setting) if side == "P" else LinkedPair(decode=setting)
    pair.prefill.engine.seconds = 0.3
    pair.request("a", 6)
    assert "min_gb_per_s" in pair.decode.failed["a"]
    pair.prefill.engine.seconds = 0.05
    pair.request("b", 5)
    assert "b" in pair.decode.received
    assert "b" not in pair.decode.failed
    assert pair.landed()
    pair.assert_idle()


@pytest.mark.parametrize("setting", REFUSALS)
def test_a_peer_of_a_release_that_does_not_report_its_lane_is_refused_only_by_settings(setting):
    pair = LinkedPair(decode=REFUSALS[setting][0])
    pair.network.lose(Transport)
    pair.request("a", 5)
    assert "its lane is not reported by this release of the prefill node" in pair.decode.failed["a"]
    assert REFUSALS[setting][1] in pair.decode.failed["a"]
    pair.run(20)
    pair.request("b", 5)
    assert "not reported" in pair.decode.failed["b"]
    assert pair.decode.count("failures", reason="transport_refused") == 2
    assert pair.decode.count("transfer_bytes") == 0
    pair.assert_idle()
    plain = LinkedPair()
    plain.network.lose(Transport)
    plain.request("a", 5)
    assert plain.landed()
    assert "a" not in plain.decode.failed
    assert plain.decode.count("transfer_bytes", lane="unknown") > 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_peer_whose_link_cannot_be_measured_is_refused(side):
    """One side has no scratch memory."""
    pair = LinkedPair(decode={"min_gb_per_s": 1e-6})
    getattr(pair, side).introduce(scratch_bytes=0)
    pair.request("a")
    assert "at a rate that was not measured" in pair.decode.failed["a"]
    assert "min_gb_per_s" in pair.decode.failed["a"]


@pytest.mark.parametrize("lane", ["unknown", "tcp"])
def test_a_lane_that_cannot_be_told_is_none_of_those_that_are_required(lane):
    found = Transport(lane, bytes_per_s=1e9)
    assert bool(refusal(ExtraConfig(require_lane="tcp, rdma"), found, "decode")) == (lane == "unknown")
    assert not refusal(ExtraConfig(min_gb_per_s=1.0), found, "decode")
    assert refusal(ExtraConfig(min_gb_per_s=1.1), found, "decode")
    assert not refusal(ExtraConfig(), found, "decode")


class Metered:
    """What a meter reports of chunks: ``shown`` rates, and those that are ``slow``.

    The chunks are of so many bytes, posted and ended at these times, alone or not. The poll before the one
    that saw a chunk's end was ``poll_s`` earlier.
    """

    def __init__(self, chunks, calibrated=10e9, poll_s=0.0) -> None:
        self.shown: list[float] = []
        self.slow: list[float] = []
        seconds_of = (lambda n: n / calibrated) if calibrated else None
        meter = LinkMeter("D", Transport("nvlink", expected_bytes_per_s=450e9), self, seconds_of)
        for number, (size, began, ended, is_alone) in enumerate(chunks):
            done = Completion(number, True, True, size, ended - began)
            meter.moved(done, ended, is_alone=is_alone, unfinished_at=ended - poll_s)

    def show(self, found: Transport) -> None:
        self.shown.append(found.bytes_per_s)

    def slowed(self, peer: str, found: Transport, calibrated: float) -> None:
        assert calibrated == pytest.approx(10e9)
        self.slow.append(found.bytes_per_s)


def test_chunks_that_follow_each_other_take_the_time_between_their_ends_and_others_measure_nothing():
    small = [(MIB - 1, n / 1000, (n + 1) / 1000, True) for n in range(200)]
    shared = [(4 * MIB, n / 1000, (n + 1) / 1000, False) for n in range(200)]
    # Each has two more before it on its way, and comes a millisecond after the one before.
    chunks = [(4 * MIB, 1 + n / 1000, 1 + (n + 3) / 1000, True) for n in range(16)]
    (rate,) = Metered(small + shared + chunks).shown
    assert rate == pytest.approx(64 * MIB / 0.018)


def windows(count, rate, at=0.0, posted_s=0.0):
    """The chunks of windows, one after the other at this rate; all but a window's first are posted ahead."""
    made = []
    for number in range(count):
        times = [at + 10 * number + chunk * 16 * MIB / rate for chunk in range(5)]
        made += [
            (16 * MIB, began - posted_s * (began > times[0]), end, True) for began, end in pairwise(times)
        ]
    return made


@pytest.mark.parametrize(("slow", "judged"), [(3, 0), (4, 1), (6, 3)])
def test_a_link_is_slow_if_it_is_so_four_windows_in_a_row(slow, judged):
    """Time in which the thread does not poll is not the link's; without a calibration none is slow."""
    chunks = [*windows(2, 1e9), *windows(1, 9e9, 100.0), *windows(slow, 4e9, 200.0, posted_s=0.01)]
    chunk_s = 16 * MIB / 4e9
    for is_judged, given in (
        (True, {}),
        (True, {"poll_s": 0.1 * chunk_s}),
        (False, {"poll_s": 0.4 * chunk_s}),
        (False, {"calibrated": 0.0}),
    ):
        reported = Metered(chunks, **given)
        assert reported.slow == pytest.approx([4e9] * judged * is_judged)
        assert len(reported.shown) == 3 + slow


@pytest.mark.parametrize(("lane", "is_slow"), [("nvlink", False), ("cuda_ipc", False), ("rdma", True)])
def test_a_calibration_is_judged_by_the_hardware_only_where_a_network_carries_it(lane, is_slow):
    metrics = Metrics()
    Transports(metrics, DuplicateFilter()).met("P", Transport(lane, "", "", 27.2e9, 450e9))
    assert metrics.failures.labels("slow_link").value == is_slow


def probed(bytes_per_s: float) -> tuple[ProbeOutbox, list[int]]:
    """A calibration over a link of this rate, and the bytes of its batches."""
    probe, sizes = ProbeOutbox(1 << 20, 1 << 30, MIB, Traffic()), []
    while (columns := probe.peek()) is not None:
        sizes.append(columns[2])
        probe.submitted(len(sizes))
        assert probe.peek() is None, "each is alone on its way"
        # To connect takes as long as it takes.
        seconds = 3.0 if len(sizes) == 1 else sizes[-1] / bytes_per_s
        probe.ended(Completion(len(sizes), True, True, sizes[-1], seconds))
    return probe, sizes


def test_a_calibration_connects_by_a_small_batch_and_then_fills_the_scratch_memory():
    probe, sizes = probed(1e9)
    assert sizes == [4096, 4096, 16384, 65536, 262144, MIB, MIB, MIB]
    assert probe.bytes_per_s == pytest.approx(1e9)


def test_a_batch_takes_as_long_as_those_of_its_size_in_the_calibration():
    probe, _ = probed(1e9)
    seconds = [(size, 1e-3 + size / 1e9) for size in (4096, 65536, MIB, MIB)]
    probe.samples = [Completion(1, True, True, *sample) for sample in (*seconds, (MIB, 5.0))]
    for size in (4096, 30000, 65536, 500000, MIB):
        assert probe.seconds_of(size) == pytest.approx(1e-3 + size / 1e9)
    assert probe.seconds_of(4 * MIB) == pytest.approx(4 * probe.seconds_of(MIB))
    assert ProbeOutbox(1 << 20, 1 << 30, MIB, Traffic()).seconds_of(MIB) == 0


@pytest.mark.parametrize("rate", [3e3, 5e4, 1e6])
def test_a_slow_link_is_measured_in_some_seconds(rate):
    probe, sizes = probed(rate)
    assert probe.bytes_per_s == pytest.approx(rate)
    assert sum(sizes[1:]) / rate < 3
