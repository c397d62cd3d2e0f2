"""``kvconnect doctor --peer``: a good pair passes, and what keeps two nodes apart is named."""

from __future__ import annotations

import dataclasses
import json
import time

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from kvconnect.cli import app
from kvconnect.halves.rank_traits import RankTraits, SentCache
from kvconnect.halves.worker_half import TransferWorker
from kvconnect.pack.arena import Arena
from kvconnect.peer import messages
from kvconnect.peer.asking import describe
from kvconnect.peer.description import introduced
from kvconnect.peer.keyring import new_key_pair, new_secret
from kvconnect.peer.messages import PROTOCOL_VERSION, CacheMeaning
from kvconnect.tools import doctor_runner, link_check
from kvconnect.tools.findings import Level, well
from kvconnect.transfer.orders import Orders
from kvconnect.vllm.configuration import read_configuration
from tests.identities import named
from tests.ports import free_port
from tests.tools.kit import QUICK, configured, failures, finds, found
from tests.transfer.pair import HEADS, PlainCache

MEMORY = dataclasses.replace(QUICK, engines=finds({"memory": ""}))
CONSUMER = configured("kv_consumer", engine="memory")


class Node:
    """Workers that serve: one rank of a cache each, with neighbouring ports."""

    def __init__(self, role, *, ranks=1, model="m", weights="1f", **extra) -> None:
        extra = {"engine": "memory", "slot_bytes": 1 << 16, "num_slots": 2, "port": free_port(), **extra}
        self.given = configured(role, **extra)
        self.workers = []
        config = read_configuration(self.given)
        for rank in range(ranks):
            cache = PlainCache(8, rank, ranks)
            sent = SentCache(cache.described, CacheMeaning(named(model, weights), HEADS, ranks))
            traits = RankTraits(rank, sent=sent)
            self.workers.append(TransferWorker(config, traits))
        for worker in self.workers:
            worker.start(Orders(step=0, directory=tuple(one.address() for one in self.workers)))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.workers[0].address().port}"


@pytest.fixture
def node(monkeypatch):
    """Makes nodes with one key, and closes them."""
    monkeypatch.setenv("KVCONNECT_KEY", new_secret())
    made = []

    def make(role, **changes):
        made.append(Node(role, **changes))
        return made[-1]

    yield make
    for one in made:
        for worker in one.workers:
            worker.close()


def asked(given, peer, probes=MEMORY):
    return found(given, probes=probes, peers=(peer,))


def changed(**changes):
    """What asks, and reads other facts than the peer told."""

    def altered(*arguments):
        timed = describe(*arguments)
        told = timed.value
        fields = {name: value(told) if callable(value) else value for name, value in changes.items()}
        return dataclasses.replace(timed, value=msgspec.structs.replace(told, **fields))

    return dataclasses.replace(MEMORY, describe=altered)


def test_a_good_pair_over_nixl_passes_whole(node):
    prefill, decode = (node(role, engine="nixl") for role in ("kv_producer", "kv_consumer"))
    done = CliRunner().invoke(
        app,
        ["doctor", "--json", "--kv-transfer-config", decode.given, "--peer", prefill.address, "--measure"],
    )
    said = {one["about"]: one for one in json.loads(done.stdout)["findings"]}
    assert [one for one in said.values() if one["level"] == "failure"] == []
    assert done.exit_code == 0
    assert said["caches"]["found"].startswith("rank to rank 0 > 0: they fit, and send heads 0-1, as pages: ")
    assert "UCX NET_DEVICES=lo" in said["lane"]["found"]
    assert said["identity, weights"]["found"] == "the same on both: files 1f"
    assert said["port"]["found"].startswith("a node serves on")
    assert "kv_consumer here, kv_producer there" in said["roles"]["found"]
    assert " GB/s" in said["contiguous"]["found"]
    (worker,) = prefill.workers
    deadline = time.monotonic() + 5
    while worker.state()["slots"] or worker.state()["sendings"]:
        assert time.monotonic() < deadline


def test_what_measures_a_link_gets_nothing_of_the_cache_and_leaves_nothing(node, monkeypatch):
    prefill = node("kv_producer")
    (worker,) = prefill.workers
    for cache in worker._cache.tensors.values():
        cache.tensor.view(torch.int16).fill_(0x5A5A)
    made = []
    monkeypatch.setattr(link_check, "Arena", lambda *a: made.append(Arena(*a)) or made[0])
    said = found(CONSUMER, probes=MEMORY, peers=(prefill.address,), measured=True)
    assert failures(said) == {}
    assert " GB/s" in said["contiguous"].found
    (arena,) = made
    received = arena.view(arena.scratch_address, arena.scratch_bytes)
    assert int((received == 0x5A).sum()) == 0
    assert worker.state()["leases"] == worker.state()["sendings"] == 0


def test_a_peer_that_has_shared_memory_itself_is_measured_over_its_engine(node):
    """What it is sent is not the memory of its own landing slots."""
    both = node("kv_both", engine="nixl")
    assert both.workers[0].local.introduction.memory is not None
    given = configured("kv_consumer", engine="nixl")
    said = found(given, probes=MEMORY, peers=(both.address,), measured=True)
    assert " GB/s" in said["contiguous"].found
    assert "mapped" not in said["contiguous"].found


def without_slots(told):
    return introduced(msgspec.structs.replace(told.introduction, slot_bytes=0))


def test_a_peer_that_only_fetches_is_not_measured_and_said_so(node):
    decode = node("kv_consumer")
    given = configured("kv_producer", engine="memory")
    said = found(given, probes=MEMORY, peers=(decode.address,), measured=True)
    assert failures(said) == {}
    assert "the peer only fetches" in said["rate"].found


def test_a_peer_that_cannot_measure_says_why_at_once(node):
    prefill = node("kv_producer")
    prefill.workers[0].drain(1.0)
    began_at = time.monotonic()
    said = found(CONSUMER, probes=MEMORY, peers=(prefill.address,), measured=True)
    assert "nothing came over" in failures(said)["rate"]
    assert time.monotonic() - began_at < 9


def test_all_ranks_are_asked_and_each_pair_of_them_is_lined_up(node):
    prefill, decode = node("kv_producer", ranks=2), node("kv_consumer")
    for ours, theirs in ((decode, prefill), (prefill, decode)):
        said = doctor_runner.examine(ours.given, MEMORY, (theirs.address,), 16)
        pairs = [one.found.partition(" as ")[0] for one in said if one.about == "caches"]
        fit = "they fit, and send heads"
        assert pairs == [f"rank to rank 0 > 0: {fit} 0-0,", f"rank to rank 1 > 0: {fit} 1-1,"]


def test_a_node_that_does_not_run_is_not_compared_and_the_engine_is(node):
    prefill = node("kv_producer")
    said = asked(CONSUMER, prefill.address)
    assert failures(said) == {}
    assert said["caches"].level is Level.WARNING
    assert said["peer's weights"].found == "files 1f"
    said = failures(asked(configured("kv_consumer", engine="nixl"), prefill.address, QUICK))
    assert "the peer's is memory, here it is nixl" in said["engine"]


def test_another_key_is_named_with_what_to_compare_and_on_our_port_it_is_another_program(node, monkeypatch):
    prefill = node("kv_producer")
    monkeypatch.setenv("KVCONNECT_KEY", new_secret())
    said = failures(asked(CONSUMER, prefill.address))
    assert list(said) == ["peer"]
    assert "kvconnect keys show" in said["peer"]
    said = failures(found(prefill.given, probes=MEMORY))
    assert "no node with our key" in said["port"]
    assert "different keys" in said["port"]


def test_a_peer_that_is_not_known_or_not_allowed_is_a_failure(tmp_path):
    keys = ["keys", "add", str(tmp_path), "p", new_key_pair().public.hex(), "--at", "10.0.0.2:5"]
    for command in (["keys", "node", str(tmp_path)], keys):
        assert CliRunner().invoke(app, command).exit_code == 0
    given = configured("kv_consumer", engine="memory", keys_dir=str(tmp_path), allow_peers=["10.0.0.0/24"])
    said = failures(asked(given, "10.0.0.2:6"))
    assert "no public key is known of a peer at 10.0.0.2:6" in said["peer"]
    said = failures(asked(given, "10.1.0.1:5"))
    assert "allow_peers does not have 10.1.0.1:5 > add it to allow_peers" in said["peer"]


def test_a_clock_that_is_off_is_a_failure_and_one_that_is_so_a_little_a_warning(node):
    prefill = node("kv_producer")
    for ahead_s, level, text in (
        (90, Level.FAILURE, "90 s ahead"),
        (-90, Level.FAILURE, "90 s behind"),
        (20, Level.WARNING, ""),
        (0, Level.PASS, ""),
    ):
        probes = changed(clock_s=lambda told, ahead_s=ahead_s: told.clock_s + ahead_s)
        said = asked(CONSUMER, prefill.address, probes)
        assert said["clock"].level is level, ahead_s
        assert text in said["clock"].found
        assert list(failures(said)) == ["clock"] * (level is Level.FAILURE)
        assert level is not Level.FAILURE or "NTP" in said["clock"].advice


def test_another_model_and_other_weights_are_named_with_both(node):
    prefill, decode = node("kv_producer"), node("kv_consumer", model="n", weights="2e")
    said = failures(asked(decode.given, prefill.address))
    assert sorted(said) == ["identity, model", "identity, weights"]
    assert "model is m on the prefill node, n on the decode node" in said["identity, model"]
    assert "weights.files is 1f on the prefill node, 2e on the decode node" in said["identity, weights"]


def test_caches_that_do_not_fit_are_a_failure_with_every_reason(node):
    prefill, decode = node("kv_producer"), node("kv_consumer")

    def other(told):
        # The node that asks describes itself too.
        if told.role == "kv_consumer":
            return told.introduced
        told = msgspec.structs.replace(told, introduced=without_slots(told))
        table = told.introduction.table
        regions = tuple(msgspec.structs.replace(region, dtype="bfloat16") for region in table.regions)
        table = msgspec.structs.replace(table, regions=regions)
        return introduced(msgspec.structs.replace(told.introduction, table=table))

    said = failures(asked(decode.given, prefill.address, changed(introduced=other)))
    assert list(said) == ["caches"]
    assert "dtype is bfloat16 on the prefill node, " in said["caches"]
    assert "one of them has no slots" in said["caches"]


def test_an_entry_that_only_another_release_states_is_named(node):
    prefill, decode = node("kv_producer"), node("kv_consumer")

    def other(told):
        meaning = told.introduction.meaning
        stated = meaning.identity.replace(planet={"": told.role})
        meaning = msgspec.structs.replace(meaning, identity=stated)
        return introduced(msgspec.structs.replace(told.introduction, meaning=meaning))

    said = failures(asked(decode.given, prefill.address, changed(introduced=other)))
    assert list(said) == ["identity, planet"]
    assert (
        "planet is kv_producer on the prefill node, kv_consumer on the decode node"
        in said["identity, planet"]
    )


def test_another_release_is_a_failure_that_names_both(node):
    prefill = node("kv_producer")
    probes = changed(release="9.0", protocol=PROTOCOL_VERSION + 1, introduced=msgspec.Raw(b"\xc0"))
    said = failures(asked(CONSUMER, prefill.address, probes))
    assert list(said) == ["release"]
    assert f"9.0 (protocol {PROTOCOL_VERSION + 1})" in said["release"]


def test_a_peer_that_answers_nonsense_is_a_failure_beside_all_others(node):
    prefill = node("kv_producer")
    probes = changed(introduced=msgspec.Raw(b"\xc0"))
    said = failures(asked(CONSUMER, prefill.address, probes))
    assert list(said) == ["peer"]
    assert "its introduction cannot be read" in said["peer"]


def test_a_release_that_answers_no_questions_is_named(node, monkeypatch):
    prefill = node("kv_producer")
    former = messages.ToPrefill.__args__[:-2]
    decoders = {
        messages.Side.PREFILL: msgspec.msgpack.Decoder(former[0] | former[1]),
        messages.Side.DECODE: messages._decoders[messages.Side.DECODE],
    }
    monkeypatch.setattr(messages, "_decoders", decoders)
    said = failures(asked(CONSUMER, prefill.address))
    assert list(said) == ["release"]
    assert "install the same release" in said["release"]


def test_a_table_that_is_no_cache_is_refused_before_anything_is_computed_with_it(node):
    prefill, decode = node("kv_producer", ranks=2), node("kv_consumer")

    def absurd(told):
        ours = told.introduction
        if ours.rank != 1:
            return told.introduced
        axes = msgspec.structs.replace(ours.table.regions[0].axes, tokens=2**40)
        region = msgspec.structs.replace(ours.table.regions[0], axes=axes)
        table = msgspec.structs.replace(ours.table, regions=(region,))
        return introduced(msgspec.structs.replace(ours, table=table))

    said = failures(asked(decode.given, prefill.address, changed(introduced=absurd)))
    assert list(said) == ["caches"]
    assert "has impossible sizes" in said["caches"]


def test_what_a_peer_writes_cannot_steer_the_terminal(capsys):
    doctor_runner._print([well("peer", "a\x1b[2Jb [red]c")])
    assert "\x1b[2J" not in capsys.readouterr().out


def test_two_nodes_of_one_role_are_a_failure(node):
    prefill = node("kv_producer")
    said = failures(asked(configured("kv_producer", engine="memory"), prefill.address))
    assert "both are kv_producer" in said["roles"]


def test_a_peer_that_is_not_there_is_a_failure():
    said = failures(
        asked(configured("kv_consumer", engine="memory", insecure=True), f"127.0.0.1:{free_port()}")
    )
    assert list(said) == ["peer"]
    assert "nothing listens" in said["peer"]
    assert "not that of HTTP" in said["peer"]


@pytest.mark.parametrize(
    ("given", "names"),
    [("here", "--peer is 'here'; accepted: HOST:PORT"), ("http://127.0.0.1:9", "does not show the metrics")],
)
def test_a_peer_that_cannot_be_asked_is_a_failure_beside_all_others(given, names):
    said = asked(configured("kv_consumer", engine="memory", insecure=True), given)
    assert names in failures(said)["peer"]
    assert "Python" in said


def test_a_rank_that_is_gone_is_named(node):
    prefill = node("kv_producer", ranks=2)
    prefill.workers[1].close()
    deadline = time.monotonic() + 5
    said = failures(asked(CONSUMER, prefill.address))
    assert time.monotonic() < deadline
    assert f"nothing listens at 127.0.0.1:{prefill.workers[1].address().port}" in said["peer"]
