"""Transfers that are kept to be posted again: which, how many, and when they must go."""

from __future__ import annotations

from kvconnect.engine.nixl_library import Copy, TransferCache


def copy(number: int, agent: str = "a") -> Copy:
    return Copy(agent, number, number, 8)


def test_a_transfer_is_taken_by_one_batch_at_a_time():
    kept = TransferCache(lambda _: None)
    kept.put(copy(1), "first")
    assert kept.take(copy(2)) is None
    assert kept.take(copy(1, "b")) is None
    assert kept.take(copy(1)) == "first"
    assert kept.take(copy(1)) is None


def test_what_is_not_kept_is_released_once():
    released: list[str] = []
    kept = TransferCache(released.append)
    kept.put(copy(1), "first")
    kept.put(copy(1), "second")
    assert released == ["first"], "two batches of one copy were under way"
    for number in range(2, 1000):
        kept.put(copy(number), str(number))
    assert len(kept) < 500
    assert released[:3] == ["first", "second", "2"]
    assert len(released) + len(kept) == 1000


def test_those_to_one_agent_go_with_it_and_all_go_with_the_memory():
    released: list[str] = []
    kept = TransferCache(released.append)
    for agent in "ab":
        for number in (1, 2):
            kept.put(copy(number, agent), f"{agent}{number}")
    kept.drop("a")
    assert released == ["a1", "a2"]
    assert kept.take(copy(1, "a")) is None
    kept.drop()
    assert sorted(released) == ["a1", "a2", "b1", "b2"]
