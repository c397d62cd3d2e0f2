"""Receipts of the scheduler half: over every sequence of hooks the origins add up to the prompt's tokens."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import parse_kv_transfer_config
from kvconnect.halves.building import Trust, build_scheduler_half
from kvconnect.halves.receipts import Receipts
from kvconnect.outcome import Cause, Outcome
from kvconnect.peer.timeline_page import digest
from kvconnect.receipt import LOADED, LoadPart, verify
from kvconnect.transfer.orders import Results
from kvconnect.transfer.params import HANDLE_KEY
from kvconnect.transfer.stack import StackTraits
from tests.halves.test_scheduler_half import ATTENTION, HANDLES, Request, connector, prefilled

SECRET = b"what this cluster signs receipts with"
ASKED = {"kvconnect_receipt": True}


def receipts(secret=SECRET, is_for_all=False, warn=lambda *texts: None, **traits):
    return Receipts(
        "D",
        "10.0.0.1:5600",
        StackTraits(clock=lambda: 0.0, **traits),
        secret,
        is_for_all=is_for_all,
        wall_clock=lambda: 1000.0,
        warn=warn,
    )


def loaded(name, num_bytes=10, rank="a"):
    return Outcome(name, "P", ("h", 1), "lease", 1, num_bytes, 0.1, "tcp", None, ("ours", "theirs"), rank)


@settings(max_examples=400)
@given(st.data())
def test_whatever_happens_the_origins_add_up(data):
    made = receipts()
    length = data.draw(st.integers(1, 200))
    request = Request("r", length, dict(ASKED))
    made.new_request(request)
    loading = is_running = False
    for _ in range(data.draw(st.integers(0, 12))):
        step = data.draw(st.sampled_from(["look", "admit", "end", "preempt", "again", "token"]))
        if step == "look" and not loading and not is_running:
            device = data.draw(st.integers(0, length))
            made.looked_up("r", device)
            if data.draw(st.booleans()):
                count = data.draw(st.integers(0, length - device))
                disk = data.draw(st.integers(0, count))
                by_origin = (
                    {"disk": disk, "host": count - disk} if data.draw(st.booleans()) else {"peer": count}
                )
                by_origin = {origin: tokens for origin, tokens in by_origin.items() if tokens}
                load = LoadPart(origin="peer", tokens=count, ended="") if count else None
                made.admitted(request, load, by_origin, data.draw(st.sampled_from(["", "not_held"])))
                loading, is_running = bool(count), not count
        elif step == "again" and not loading:
            # A loaded request is admitted a second time.
            made.admitted(request, None, {}, "")
            is_running = True
        elif step == "end" and loading:
            failed = {"r": Cause.TIMEOUT("late")} if data.draw(st.booleans()) else {}
            made.update_results(Results(received=("r",), failed=failed, outcomes=(loaded("r"), loaded("r"))))
            loading = False
        elif step == "preempt" and is_running:
            made.preempted("r")
            is_running = False
        elif step == "token" and is_running:
            request.num_tokens += 1
    receipt = verify(made.finished(request, None, delivered=data.draw(st.booleans())), SECRET)
    assert sum(receipt.tokens.values()) == receipt.prompt_tokens
    assert all(count > 0 for count in receipt.tokens.values())
    assert not made.records


def served(half, request, tokens, device=0, failed=None, wants=True):
    """A request that D loads, computes and answers; its answer's parameters."""
    half.new_request(request)
    count, _ = half.matched_tokens(request, device)
    half.update_after_alloc(request, ([7, 8, 9, 10],), count or 0)
    if orders := half.build_orders().loads:
        (load,) = orders
        assert load.wants_outcome == wants
        name = request.request_id
        outcomes = (loaded(name), loaded(name, 5, "b")) if wants else ()
        half.update_results(
            Results(received=(name,), failed={name: failed} if failed else {}, outcomes=outcomes)
        )
    if failed:
        count, _ = half.matched_tokens(request, 0)
        half.update_after_alloc(request, ([7, 8, 9, 10],), 0)
    request.num_tokens += tokens
    return half.request_finished(request, ([7, 8, 9, 10],), delivered=True)[1]


def test_a_request_that_wants_none_has_none_and_its_load_reports_no_outcome():
    _, _, handed = prefilled()
    half = connector("kv_consumer")
    assert served(half, Request("d", 40, handed), 1, wants=False) is None
    assert half.receipts is not None
    assert not half.build_orders().receipts


def test_a_loaded_request_has_what_each_rank_moved():
    _, _, handed = prefilled()
    half = connector("kv_consumer")
    answer = served(half, Request("d", 40, {**handed, **ASKED}), 2, device=16)
    receipt = answer["kvconnect_receipt"]
    assert receipt["tokens"] == {"device": 16, "peer": 24}
    (load,) = receipt["loads"]
    assert load.pop("us", 0) >= 0
    assert load == {
        "origin": "peer",
        "tokens": 24,
        "ended": LOADED,
        "bytes": 15,
        "digest": "a,b",
        "tier": "device",
        "engine_id": "P",
        "address": "10.0.0.1:5600",
        "lane": "tcp",
        "by": "lease",
        "identity": "theirs",
    }
    assert receipt["identity"] == "ours"
    # The same for the inspection.
    assert half.build_orders().receipts == (receipt,)
    assert not half.state()["receipts"]


def test_a_failed_load_is_computed_and_the_receipt_has_the_cause():
    _, _, handed = prefilled()
    half = connector("kv_consumer", receipts=True)
    failure = Cause.TIMEOUT("too late")
    receipt = served(half, Request("d", 40, handed), 1, failed=failure)["kvconnect_receipt"]
    assert receipt["tokens"] == {"computed": 40}
    assert [(load["tokens"], load["ended"]) for load in receipt["loads"]] == [(40, "load_timeout")]


def test_kv_that_is_not_fetched_has_its_cause():
    half = connector("kv_consumer", receipts=True)
    _, _, handed = prefilled()
    request = Request("d", 40, {**handed, HANDLE_KEY: "forged"})
    request.kv_transfer_params["do_remote_prefill"] = True
    half.new_request(request)
    count, _ = half.matched_tokens(request, 0)
    half.update_after_alloc(request, ([7, 8, 9],), count)
    (load,) = half.build_orders().loads
    assert load.refusal is not None
    half.update_results(Results(received=("d",), failed={"d": load.refusal}))
    assert half.request_finished(request, ([7, 8, 9],), delivered=False)[1] is None
    (receipt,) = half.build_orders().receipts
    assert receipt["tokens"] == {"unserved": 40}
    assert receipt["loads"][0]["ended"] == "parameters_refused"


@pytest.mark.parametrize(("on_device", "tier"), [([True, True], "device"), ([True, False], "disk")])
def test_named_kv_was_on_the_device_where_all_ranks_report_it(on_device, tier):
    made, request = receipts(), Request("r", 40, dict(ASKED))
    made.new_request(request)
    made.looked_up("r", 0)
    # What the answer to the lookup lets D assume.
    made.admitted(request, LoadPart(origin="peer", tokens=40, ended="", tier="disk"), {"peer": 40}, "")
    outcomes = tuple(msgspec.structs.replace(loaded("r"), on_device=one) for one in on_device)
    made.update_results(Results(received=("r",), outcomes=outcomes))
    request.num_tokens += 1
    (load,) = verify(made.finished(request, None, delivered=True), SECRET).loads
    assert load.tier == tier


def of_prefill(handle="h", secret=SECRET):
    made = receipts(secret)
    request = Request("p", 40, dict(ASKED))
    made.new_request(request)
    request.num_tokens += 1
    return made.finished(request, {HANDLE_KEY: handle}, delivered=True)


def test_the_receipt_of_p_is_passed_on_only_with_the_handle_that_it_came_with():
    refused = []
    made = receipts(warn=lambda reason, *texts: refused.append(reason))
    good, changed = of_prefill(), {**of_prefill(), "prompt_tokens": 7}
    cases = [(good, "h"), (good, "other"), (changed, "h"), (of_prefill(secret=b"theirs"), "h"), ({}, "h")]
    for number, (given_receipt, handle) in enumerate(cases):
        request = Request(
            str(number), 40, {"kvconnect_receipt": given_receipt or {"x": 1}, HANDLE_KEY: handle}
        )
        made.new_request(request)
        request.num_tokens += 1
        receipt = made.finished(request, None, delivered=True)
        assert receipt["handle" if "handle" in receipt else "version"]
        assert ("prefill" in receipt) == (number == 0), number
    assert refused == ["receipt_refused"] * 4
    assert verify(good, SECRET).handle == digest("h")


def test_a_node_without_transfers_counts_a_receipt_that_it_refuses():
    given = {"engine": "none", "offload": {"cpu_bytes": 1 << 20}}
    config = parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": given})
    trust = Trust(HANDLES, receipt_secret=SECRET)
    half = build_scheduler_half(config, KVCacheConfig(100, (ATTENTION,)), trust=trust)
    half.new_request(Request("r", 40, {"kvconnect_receipt": {"x": 1}}))
    assert half.build_orders().failures == ("receipt_refused",)
    assert not half.build_orders()


def test_a_prefill_node_names_the_handle_in_its_receipt():
    half = connector("kv_producer")
    request = Request("p", 40, {"do_remote_decode": True, **ASKED})
    half.new_request(request)
    half.matched_tokens(request, 16)
    half.update_after_alloc(request, ([1, 2, 3],), 0)
    request.num_tokens += 1
    kept, params = half.request_finished(request, ([1, 2, 3],), delivered=True)
    assert kept
    receipt = params["kvconnect_receipt"]
    assert receipt["handle"] == digest(params[HANDLE_KEY])
    assert HANDLES.read(params[HANDLE_KEY]).engine_id == receipt["engine_id"] == "P"
    assert receipt["tokens"] == {"device": 16, "computed": 24}
    # These halves have a secret for handles alone.
    assert receipt["signature"] == ""
