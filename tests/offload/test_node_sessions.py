"""Sessions on a node: what they pinned comes back after pressure, and every answer says what is true."""

from __future__ import annotations

import math
import time
from functools import cache

import pytest

from tests.node.node_harness import make_prompt
from tests.offload.node_kit import POOLS, disk_settings, expected, make_keeper, wipe

MODELS = ("mixed", "sliding", "hybrid")
FIRST = make_prompt(300, seed=1)


def hints(*actions: tuple[str, dict], session: str = "s", **more) -> dict:
    """``kv_transfer_params`` with these actions."""
    listed = [
        {"action_id": f"{number}", "action_type": kind, "action_version": "1", "payload": payload}
        for number, (kind, payload) in enumerate(actions)
    ]
    envelope = {"protocol_version": "1", "message_id": "m", "actions": listed}
    return {"kv_hints": envelope, "session_id": session, **more}


@cache
def turn_bytes(model: str) -> dict[int, int]:
    """What a turn takes of host memory, by cache group."""
    probe = make_keeper(model=model, num_blocks=POOLS[model])
    probe.ask(FIRST, 8)
    usage = probe.engine.offload_state()["usage"]
    rows = {int(group): length for group, length in usage["row_bytes"].items()}
    return {int(group): counts["held"] * rows[int(group)] for group, counts in usage["host"].items()}


class Talk:
    """A node with memory for some turns, maybe with a prefix cache of its own, and one that keeps nothing."""

    def __init__(
        self, model: str, num_blocks: int = 0, turns: int = 4, is_caching: bool = False, **offload
    ) -> None:
        each = turn_bytes(model)
        self.turn_bytes = sum(each.values())
        self._model, self._turns = model, turns
        offload = {"cpu_bytes": turns * self.turn_bytes, "pin_quota": 0.5, **offload}
        offload["shares"] = [length / self.turn_bytes for _, length in sorted(each.items())]
        self.keeper = make_keeper(
            model=model,
            num_blocks=num_blocks or POOLS[model],
            offload=offload,
            enable_prefix_caching=is_caching,
        )

    def ask(self, prompt: list[int], *actions: tuple[str, dict], max_tokens: int = 8, **more) -> list[int]:
        params = hints(*actions, **more) if actions else more or None
        tokens = self.keeper.ask(prompt, max_tokens, params)
        assert tokens == expected(prompt, max_tokens, model=self._model)
        return tokens

    def press(self, times: int = 2) -> None:
        """So many times all that host memory has room for is kept of others, and the device forgets."""
        for number in range(self._turns * times):
            prompt = make_prompt(290, seed=100 + number)
            self.keeper.ask(prompt, 1)
        wipe(self.keeper)

    @property
    def last(self):
        return self.keeper.last(next(reversed(self.keeper.outputs)))

    @property
    def answers(self) -> list[dict]:
        return self.last.kv_transfer_params["kv_hint_results"]["actions"]

    @property
    def cached(self) -> int:
        return self.keeper.cached

    @property
    def pinned(self) -> int:
        return sum(self.keeper.engine.offload_state()["usage"]["pinned"].values())

    def pinned_bytes(self, tier: str, expected: int) -> bool:
        """Whether the metric of a tier becomes this."""
        gauge = self.keeper.engine.worker.offload._metrics.pinned[tier]
        deadline = time.monotonic() + 10
        while gauge.value != expected and time.monotonic() < deadline:
            self.keeper.step()
            time.sleep(0.01)
        return gauge.value == expected


@pytest.mark.parametrize("model", MODELS)
def test_the_next_turn_of_a_pinned_session_restores_all_of_it(model):
    talk = Talk(model)
    answer = talk.ask(FIRST, ("pin", {"ttl_s": 600}), max_tokens=40)
    (first,) = talk.answers
    assert first["action_type"] == "pin"
    assert first["outcome"] == "accepted", first
    # The turn's own answer too, but for its last block.
    assert first["num_tokens"] >= (256 if model == "mixed" else 320)
    talk.press()
    second = [*FIRST, *answer[:40], *make_prompt(20, seed=2)]
    talk.ask(second, ("pin", {"ttl_s": 600}))
    assert talk.cached >= first["num_tokens"]
    talk.press()
    talk.ask(second)
    assert talk.cached >= first["num_tokens"]


def test_a_prompt_is_kept_from_the_moment_that_it_is_stored():
    """Others press while the answer is decoded: what makes room then is not stored anew."""
    talk = Talk("hybrid", num_blocks=4 * POOLS["hybrid"], turns=8)
    keeper = talk.keeper
    keeper.submit("long", FIRST, 30, hints(("pin", {})))
    number = 0
    while not keeper.last("long"):
        number += 1
        keeper.complete(make_prompt(290, seed=700 + number), 1)
    assert number > 8
    (pinned,) = keeper.last("long").kv_transfer_params["kv_hint_results"]["actions"]
    assert pinned["outcome"] == "accepted", pinned
    answer = keeper.tokens("long")
    keeper.settle()
    talk.press()
    talk.ask([*FIRST, *answer, *make_prompt(3, seed=2)])
    assert talk.cached >= pinned["num_tokens"]


def test_a_pin_is_over_when_it_is_released_or_had_its_time():
    talk = Talk("gqa")
    talk.ask(FIRST, ("pin", {}))
    pinned = talk.answers[0]["num_tokens"]
    assert talk.pinned_bytes("host", talk.pinned * talk.turn_bytes * 16 // 304)
    assert talk.pinned_bytes("disk", 0)
    talk.ask(make_prompt(20, seed=5), ("release", {"session_id": "t"}), ("release", {}), ("release", {}))
    other, ours, again = (answer["outcome"] for answer in talk.answers)
    assert (other, ours, again) == ("expired", "accepted", "expired")
    assert talk.answers[1]["num_tokens"] == pinned
    assert talk.pinned == 0
    assert talk.pinned_bytes("host", 0)
    talk.press()
    talk.ask(FIRST, ("pin", {"ttl_s": 0.01}))
    assert talk.cached == 0
    talk.press(1)
    assert talk.pinned == 0
    talk.ask(make_prompt(20, seed=6), ("release", {}))
    assert talk.answers[0]["outcome"] == "expired"


@pytest.mark.parametrize("turn", ["goes on", "begins anew"])
def test_what_a_session_had_is_released_and_the_prompt_pinned_by_one_request(turn):
    talk = Talk("hybrid")
    talk.ask(FIRST, ("pin", {}))
    before = talk.answers[0]["num_tokens"]
    prompt = [*FIRST, *make_prompt(60, seed=7)] if turn == "goes on" else make_prompt(300, seed=7)
    answer = talk.ask(prompt, ("release", {}), ("pin", {}), ("release", {"session_id": "t"}))
    released, pinned, other = talk.answers
    assert (released["outcome"], released["num_tokens"]) == ("accepted", before)
    assert pinned["outcome"] == "accepted", pinned
    assert other["outcome"] == "expired"
    talk.press()
    talk.ask([*prompt, *answer, *make_prompt(3, seed=8)])
    assert talk.cached >= pinned["num_tokens"]
    if turn == "begins anew":
        talk.press()
        talk.ask(FIRST)
        assert talk.cached == 0
    # In the other order nothing is left.
    talk.ask(prompt, ("pin", {}), ("release", {}))
    assert [answer["outcome"] for answer in talk.answers] == ["accepted", "accepted"]
    assert talk.pinned == 0


def test_a_release_before_a_pin_that_fails_leaves_nothing():
    talk = Talk("gqa")
    talk.ask(FIRST, ("pin", {}))
    talk.ask(make_prompt(8, seed=7), ("release", {}), ("pin", {}))
    assert [answer["outcome"] for answer in talk.answers] == ["accepted", "rejected"]
    assert talk.pinned == 0


def test_a_turn_whose_client_leaves_ends_nothing_of_what_the_session_had():
    talk = Talk("hybrid")
    keeper = talk.keeper
    answer = talk.ask(FIRST, ("pin", {}), max_tokens=40)
    pinned = talk.answers[0]["num_tokens"]
    second = [*FIRST, *answer[:40], *make_prompt(40, seed=2)]
    keeper.submit("gone", second, 8, hints(("pin", {"ttl_s": 0.01})))
    keeper.step()
    keeper.engine.abort("gone")
    keeper.settle()
    talk.press()
    talk.ask(second)
    assert talk.cached >= pinned


def test_nothing_is_pinned_of_a_turn_that_was_told_so(tmp_path):
    """What a running turn had pinned is demoted by others meanwhile, and makes room in host memory."""
    talk = Talk("gqa", num_blocks=4 * POOLS["gqa"], **disk_settings(tmp_path))
    keeper, number = talk.keeper, 0
    keeper.submit("long", FIRST, 40, hints(("pin", {})))
    while not keeper.last("long"):
        number += 1
        keeper.complete(make_prompt(290, seed=700 + number), 1, hints(("demote", {})))
    keeper.settle()
    (answer,) = keeper.last("long").kv_transfer_params["kv_hint_results"]["actions"]
    assert answer["outcome"] == "rejected", answer
    assert talk.pinned == 0


@pytest.mark.parametrize("model", ["gqa", "sliding"])
def test_what_is_beyond_the_quota_is_clipped_and_said(model):
    talk = Talk(model, pin_quota=0.1, tenant_key="tenant")
    talk.ask(FIRST, ("pin", {}), tenant="a")
    (first,) = talk.answers
    if model == "sliding":
        # Its windows alone are more than that.
        assert first["outcome"] == "rejected"
        assert talk.pinned == 0
        return
    assert first["outcome"] == "clipped"
    assert 0 < first["num_tokens"] < 256
    assert "quota" in first["reason"]
    # Another session of the tenant has no more room, another tenant has.
    other = make_prompt(300, seed=9)
    talk.ask(other, ("pin", {}), session="t", tenant="a")
    assert talk.answers[0]["outcome"] == "rejected"
    talk.ask(other, ("pin", {"ttl_s": 1e6}), session="t", tenant="b")
    assert talk.answers[0]["outcome"] == "clipped"
    assert talk.answers[0]["ttl_s"] == 3600
    talk.press()
    talk.ask(FIRST)
    assert talk.cached == first["num_tokens"]


@pytest.mark.parametrize("model", MODELS)
def test_a_session_is_demoted_to_disk_and_brought_back(model, tmp_path):
    talk = Talk(model, **disk_settings(tmp_path))
    answer = talk.ask(FIRST, ("pin", {}), max_tokens=40)
    pinned = talk.answers[0]["num_tokens"]
    talk.ask(make_prompt(20, seed=5), ("demote", {"to": "disk"}))
    (demoted,) = talk.answers
    assert demoted["outcome"] == "accepted"
    assert demoted["tier"] == "disk"
    assert demoted["num_tokens"] == pinned
    usage = talk.keeper.engine.offload_state()["usage"]["pinned"]
    assert not any(count for place, count in usage.items() if place.startswith("host"))
    talk.press()
    talk.ask(make_prompt(20, seed=6), ("prefetch", {"to": "device"}))
    (fetched,) = talk.answers
    assert fetched["outcome"] == "clipped"
    assert fetched["tier"] == "host"
    talk.press()
    # Host memory has it, whatever becomes of the disk.
    for file in tmp_path.rglob("*.kv"):
        file.unlink()
    talk.ask([*FIRST, *answer[:40], *make_prompt(20, seed=2)])
    assert talk.cached == pinned


@pytest.mark.parametrize("turns", [1, 2])
def test_a_turn_that_goes_to_disk_at_its_end_stays_there(turns, tmp_path):
    """The disk has room for about six turns, and 3 times as much is written after."""
    talk = Talk("gqa", **{**disk_settings(tmp_path), "disk_bytes": 3 << 20})
    prompt = list(FIRST)
    for _ in range(turns):
        answer = talk.ask(prompt, ("pin", {}), ("demote", {}), max_tokens=40)
        assert [each["outcome"] for each in talk.answers] == ["accepted", "accepted"]
        pinned = talk.answers[0]["num_tokens"]
        last, prompt = prompt, [*prompt, *answer[:40], *make_prompt(3, seed=len(prompt))]
    written = math.ceil(3 * (3 << 20) / talk.turn_bytes / 4)
    talk.press(written)
    talk.ask(last)
    assert talk.cached >= min(pinned, len(last) // 16 * 16 - 16)


def test_hints_that_cannot_be_read_are_said_to_be_so_and_the_request_runs():
    talk = Talk("gqa")
    envelope = {"protocol_version": "1", "message_id": "m", "actions": []}
    for given, text in (
        (7, "Expected `object`"),
        ({"protocol_version": "1"}, "message_id"),
        ({**envelope, "protocol_version": "2"}, "protocol_version"),
        ({**envelope, "actions": [{}] * 17}, "actions"),
    ):
        talk.ask(FIRST, kv_hints=given)
        assert text in talk.last.kv_transfer_params["kv_hint_results"]["error"]
        assert talk.last.finish_reason == "length"


def test_actions_that_are_not_done_are_rejected_with_what_is_accepted():
    talk = Talk("gqa")
    wrong = (
        (("evict", {}), "accepted: pin, release, prefetch, demote"),
        (("pin", {"ttl_s": -1}), "ttl_s"),
        (("pin", {"tll_s": 1}), "tll_s"),
        (("pin", {"session_id": ["s"]}), "session_id"),
        (("demote", {"to": "host"}), "accepted: to disk"),
        (("demote", {"to": "store"}), "to"),
        (("prefetch", {"to": "disk"}), "accepted: to host"),
    )
    talk.ask(FIRST, *(action for action, _ in wrong), ("pin", {}))
    *refused, pinned = talk.answers
    for (action, text), answer in zip(wrong, refused, strict=True):
        assert answer["outcome"] == "rejected", action
        assert text in answer["reason"], action
    assert pinned["outcome"] == "accepted"
    talk.ask(make_prompt(20, seed=5), ("pin", {}), session="")
    assert "session_id" in talk.answers[0]["reason"]


@pytest.mark.parametrize(("pin_quota", "more"), [(0.0, {}), (0.5, {"max_offload_tokens": 0})])
def test_nothing_is_pinned_where_the_quota_is_none_or_nothing_is_kept(pin_quota, more):
    talk = Talk("gqa", pin_quota=pin_quota)
    talk.ask(FIRST, ("pin", {}), **more)
    assert talk.answers[0]["outcome"] == "rejected"
    assert talk.pinned == 0
