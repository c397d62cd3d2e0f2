"""Whether a port is closed, asked until it can be said, and never waited for."""

from __future__ import annotations

import socket
import time

import pytest

from kvconnect.peer.probe import PortProbe


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as made:
        return made.getsockname()[1]


def said(probe, from_s=0.0, to_s=1.0):
    """The first answer of a probe that is stepped every 10 ms of its own time, and when it came."""
    now = from_s
    while now <= to_s:
        answer = probe.step(now)
        if answer is not None:
            return answer, now
        now += 0.01
        time.sleep(0.001)
    return None, now


def test_a_closed_port_is_known_at_once():
    answer, when = said(PortProbe("127.0.0.1", closed_port(), 0.0))
    assert answer is True
    assert when < 0.1


def test_an_open_port_is_never_called_closed(listener):
    answer, when = said(PortProbe("127.0.0.1", listener.getsockname()[1], 0.0))
    assert answer is False
    assert when == pytest.approx(0.6, abs=0.02)


def test_a_port_that_closes_a_little_later_is_known_to_be_closed(listener):
    probe = PortProbe("127.0.0.1", listener.getsockname()[1], 0.0)
    assert said(probe, 0.0, 0.15) == (None, pytest.approx(0.16, abs=0.02))
    listener.close()
    answer, when = said(probe, 0.16)
    assert answer is True
    assert when <= 0.5


@pytest.mark.parametrize("host", ["a.name", "localhost"])
def test_a_name_is_not_looked_up(host):
    assert PortProbe(host, 1, 0.0).step(0.0) is False


def test_a_step_never_waits_for_an_address_that_swallows_everything():
    probe = PortProbe("192.0.2.123", 9, 0.0)
    began = time.monotonic()
    answers = [probe.step(now) for now in (0.0, 0.05, 0.1, 0.3, 0.5, 0.6)]
    assert time.monotonic() - began < 0.2
    assert answers[-1] in (False, True)
    assert True not in answers[:1]
    probe.close()
    probe.close()
