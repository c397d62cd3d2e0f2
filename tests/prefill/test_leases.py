"""Leases that D renews while it waits, and the epoch under which what was written counts."""

from __future__ import annotations

import msgspec
import pytest

from kvconnect.config import ExtraConfig
from kvconnect.outcome import Cause
from kvconnect.peer.messages import Accepted, Landed, Renew, Renewed, Written
from kvconnect.transfer.orders import Orders, Withdraw
from tests.transfer.pair import D_IDS, OTHER, P_IDS, Pair

SHORT = {"lease_s": 3.0, "lease_max_s": 20.0}


def queued(**config):
    """One load is under way and does not end; the next has to wait for its turn."""
    pair = Pair(ExtraConfig(max_loads=1, **{**SHORT, **config}))
    pair.prefill.engine.hold()
    pair.start()
    pair.run(0.2)
    pair.start("b", *OTHER)
    return pair


def test_a_lease_of_what_waits_in_the_queue_is_renewed_until_it_is_fetched():
    pair = queued()
    pair.run(10)
    assert pair.prefill.count("failures", reason="lease_expired") == 0
    pair.prefill.engine.release()
    pair.run(1)
    assert sorted(pair.decode.received) == ["a", "b"]
    assert pair.decode.failed == {}
    assert pair.landed(*OTHER)
    pair.assert_idle()


def test_nothing_is_renewed_when_nothing_is_held_nor_for_what_is_fetched_at_once(pair):
    pair.start()
    pair.run(30)
    assert pair.landed()
    assert not pair.network.heard(Renew)
    assert not pair.network.heard(Renewed)


def test_a_lease_that_is_over_fails_the_load_that_waits_at_once():
    """Not the load's own deadline: P says so as soon as it ends what was renewed before."""
    pair = queued(load_timeout_s=60.0, transfer_timeout_s=60.0, quarantine_s=60.0)
    pair.run(1)
    pair.network.lose(Renew)
    pair.run(3.5)
    assert "its lease_s of 3 s is over" in pair.decode.failed["b"]
    assert "no longer renews" in pair.decode.failed["a"], (
        "also what is being sent: its decode node may be gone"
    )
    assert pair.decode.count("failures", reason="lease_over") == 2


def test_a_handle_that_p_has_not_heard_of_is_neither_renewed_nor_over():
    pair = queued()
    pair.load("early", (40,))
    pair.run(1.2)
    told = pair.network.heard(Renewed)
    assert "handle-early" in told[-1].unknown
    assert all("handle-early" not in dict(message.epochs) | dict(message.over) for message in told)
    assert not pair.decode.failed


def test_another_engine_cannot_renew_what_one_is_fetching():
    pair = Pair(ExtraConfig(**SHORT))
    pair.prefill.engine.hold()
    pair.start()
    pair.run(0.2)
    (lease,) = pair.prefill.transfers.prefill.leases.values()
    before = lease.expires_at
    assert pair.prefill.transfers.prefill.book.renew(lease, "X", "in:9", pair.clock.now + 1)
    assert lease.expires_at == before
    assert pair.prefill.transfers.prefill.book.renew(lease, "D", "in:9", pair.clock.now + 1) is None
    assert lease.expires_at > before


@pytest.mark.parametrize("kind", [Accepted, Landed, Written])
def test_what_is_of_another_epoch_is_never_a_token(pair, kind):
    """Whichever of P's messages names another lease than the others do."""
    changed = []

    def name_another(message):
        if not message.epoch or changed:
            return [message]
        changed.append(message)
        return [msgspec.structs.replace(message, epoch=message.epoch + 1)]

    pair.network.insert(kind, name_another)
    pair.load("a", D_IDS)
    if kind is Accepted:
        # It is said of a fetch that had to wait.
        pair.run(0.1)
    pair.hold("a", P_IDS)
    pair.run(0.5)
    assert changed
    assert "a" in pair.decode.failed
    assert pair.decode.count("failures", reason="epoch") == 1
    pair.network.taps.clear()
    pair.run(60, step_s=1)
    pair.assert_idle()


def test_epochs_are_others_for_every_lease_and_every_process():
    pair = Pair()
    other = pair.add("Q")
    for worker in (pair.prefill, other):
        for number in range(3):
            pair.hold(f"r{number}", (number + 1,), worker=worker)
    pair.settle()
    epochs = [
        lease.epoch for worker in (pair.prefill, other) for lease in worker.transfers.prefill.leases.values()
    ]
    assert len(set(epochs)) == 6
    assert 0 not in epochs


def test_a_handle_that_stands_for_something_else_than_when_it_was_renewed_is_no_use():
    """A router may use a transfer id twice; the request that waits is not the one that is held now."""
    pair = queued(lease_s=10.0)
    pair.run(1.2)
    pair.prefill.transfers.prefill.book.leases["handle-b"].epoch += 1000
    pair.run(12)
    assert "something else" in pair.decode.failed["b"]
    assert pair.decode.count("failures", reason="epoch") == 1


def test_what_is_fetched_has_to_be_of_the_lease_that_was_renewed():
    """Also where no renewal after that tells of another lease: the answer to the fetch does."""
    pair = queued(lease_s=10.0)
    pair.run(1.2)
    pair.network.lose(Renew)
    pair.prefill.transfers.prefill.book.leases["handle-b"].epoch += 1000
    pair.prefill.engine.release()
    pair.run(2)
    assert "something else" in pair.decode.failed["b"]
    assert pair.decode.count("failures", reason="epoch") == 1
    assert not pair.landed(*OTHER)


@pytest.mark.parametrize("sending", ["none", "ends", "fails"])
def test_a_lease_that_is_withdrawn_ends_once_nothing_reads_it(sending):
    """As where a router releases a request whose client left."""
    pair = Pair(ExtraConfig(**SHORT))
    if sending == "fails":
        pair.prefill.engine.fail_next(quiescent=True)
    if sending != "none":
        pair.prefill.engine.hold()
        pair.start()
    else:
        pair.hold("a", P_IDS)
    pair.run(0.2)
    pair.prefill.order(Orders(withdrawn=(Withdraw("handle-a", Cause.ABORTED("the client left")),)))
    pair.run(0.2)
    assert (pair.prefill.sent == []) is (sending != "none")
    pair.prefill.engine.release()
    pair.run(1)
    assert pair.prefill.sent == ["a"]
    assert pair.prefill.count("failures", reason="lease_expired") == 0
    pair.assert_idle()
