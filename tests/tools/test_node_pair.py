"""``kvconnect doctor --peer``: a good pair passes, and what keeps two nodes apart is named."""

from __future__ import annotations

import dataclasses
import json
import time

import msgspec
import pytest
import torch
from msgspec.structs import replace
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
from tests.tools.kit import configured, failures, found
from tests.transfer.pair import HEADS, PlainCache

CONSUMER, PRODUCER = (configured(role, engine="memory") for role in ("kv_consumer", "kv_producer"))


class Node:
    """Workers that serve: one rank of a cache each, with neighbouring ports."""

    def __init__(self, role, *, ranks=1, **extra) -> None:
        extra = {"engine": "memory", "slot_bytes": 1 << 16, "num_slots": 2, "port": free_port(), **extra}
        self.given = configured(role, **extra)
        self.workers = []
        config = read_configuration(self.given)
        for rank in range(ranks):
            cache = PlainCache(8, rank, ranks)
            sent = SentCache(cache.described, CacheMeaning(named("m", "1f"), HEADS, ranks))
            self.workers.append(TransferWorker(config, RankTraits(rank, sent=sent)))
        for worker in self.workers:
            worker.start(Orders(step=0, directory=tuple(one.address() for one in self.workers)))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.workers[0].address().port}"

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture(scope="module")
def nodes():
    """P of two ranks and D of one, with one key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCONNECT_KEY", new_secret())
        made = Node("kv_producer", ranks=2), Node("kv_consumer")
        yield made
    for one in made:
        one.close()


@pytest.fixture
def node():
    """Makes further nodes, and closes them."""
    made = []

    def make(role, **changes):
        made.append(Node(role, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def asked(given, *peers, measured=False, **told):
    """What the doctor says of these peers; ``told`` is read in place of what a worker tells of itself."""

    def altered(*arguments):
        timed = describe(*arguments)
        fields = {key: value(timed.value) if callable(value) else value for key, value in told.items()}
        return dataclasses.replace(timed, value=replace(timed.value, **fields))

    return found(given, *peers, measured=measured, engines={"memory": ""}, describe=altered)


@pytest.mark.usefixtures("nodes")
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


@pytest.mark.usefixtures("nodes")
def test_what_measures_a_link_gets_nothing_of_the_cache_and_leaves_nothing(node, monkeypatch):
    prefill = node("kv_producer")
    (worker,) = prefill.workers
    for cache in worker._cache.tensors.values():
        cache.tensor.view(torch.int16).fill_(0x5A5A)
    made = []
    monkeypatch.setattr(link_check, "Arena", lambda *a: made.append(Arena(*a)) or made[0])
    said = asked(CONSUMER, prefill.address, measured=True)
    assert failures(said) == {}
    assert " GB/s" in said["contiguous"].found
    (arena,) = made
    received = arena.view(arena.scratch_address, arena.scratch_bytes)
    assert int((received == 0x5A).sum()) == 0
    assert worker.state()["leases"] == worker.state()["sendings"] == 0
    worker.drain(1.0)
    began_at = time.monotonic()
    assert "nothing came over" in failures(asked(CONSUMER, prefill.address, measured=True))["rate"]
    assert time.monotonic() - began_at < 9, "a peer that cannot measure says why at once"


@pytest.mark.usefixtures("nodes")
def test_a_peer_that_has_shared_memory_itself_is_measured_over_its_engine(node):
    """What it is sent is not the memory of its own landing slots."""
    both = node("kv_both", engine="nixl")
    assert both.workers[0].local.introduction.memory is not None
    said = asked(configured("kv_consumer", engine="nixl"), both.address, measured=True)
    assert " GB/s" in said["contiguous"].found
    assert "mapped" not in said["contiguous"].found


def test_a_peer_that_only_fetches_is_not_measured_and_said_so(nodes):
    said = asked(PRODUCER, nodes[1].address, measured=True)
    assert failures(said) == {}
    assert "the peer only fetches" in said["rate"].found


def test_all_ranks_are_asked_and_each_pair_of_them_is_lined_up(nodes):
    for ours, theirs in (nodes, nodes[::-1]):
        said = doctor_runner.examine(ours.given, (theirs.address,), 16)
        pairs = [one.found.partition(" as ")[0] for one in said if one.about == "caches"]
        fit = "they fit, and send heads"
        assert pairs == [f"rank to rank 0 > 0: {fit} 0-0,", f"rank to rank 1 > 0: {fit} 1-1,"]


def test_a_node_that_does_not_run_is_not_compared(nodes):
    said = asked(CONSUMER, nodes[0].address)
    assert failures(said) == {}
    assert said["caches"].level is Level.WARNING
    assert said["peer's weights"].found == "files 1f"
    said = asked(CONSUMER, nodes[0].address, clock_s=lambda told: told.clock_s + 20)
    assert said["clock"].level is Level.WARNING


def told_by(role, alter):
    """An introduction that is altered, of nodes of this role."""
    return {
        "introduced": lambda told: (
            introduced(alter(told.introduction)) if told.role == role else told.introduced
        )
    }


def stating(alter):
    """An introduction with another identity."""
    return lambda ours: replace(ours, meaning=replace(ours.meaning, identity=alter(ours.meaning.identity)))


def with_regions(ours, **changes):
    regions = tuple(replace(region, **changes) for region in ours.table.regions)
    return replace(ours, table=replace(ours.table, regions=regions))


def absurd(ours):
    axes = replace(ours.table.regions[0].axes, tokens=2**40)
    return with_regions(ours, axes=axes) if ours.rank else ours


RUNS = None
"""D's own configuration, which runs."""
ON_P, ON_D = "on the prefill node", "on the decode node"
APART = {
    "a clock ahead": (
        *(CONSUMER, {"clock_s": lambda told: told.clock_s + 90}),
        {"clock": ("90 s ahead", "NTP")},
    ),
    "a clock behind": (CONSUMER, {"clock_s": lambda told: told.clock_s - 90}, {"clock": ("90 s behind",)}),
    "a role": (PRODUCER, {}, {"roles": ("both are kv_producer",)}),
    "an engine": (
        *(configured("kv_consumer", engine="nixl"), {}),
        {"engine": ("the peer's is memory, here it is nixl",)},
    ),
    "a release": (
        *(CONSUMER, {"release": "9.0", "protocol": PROTOCOL_VERSION + 1, "introduced": msgspec.Raw(b"\xc0")}),
        {"release": (f"9.0 (protocol {PROTOCOL_VERSION + 1})",)},
    ),
    "nonsense": (
        *(CONSUMER, {"introduced": msgspec.Raw(b"\xc0")}),
        {"peer": ("its introduction cannot be read",)},
    ),
    "a model": (
        *(RUNS, told_by("kv_consumer", stating(lambda _: named("n", "2e")))),
        {
            "identity, model": (f"model is m {ON_P}, n {ON_D}",),
            "identity, weights": (f"weights.files is 1f {ON_P}, 2e {ON_D}",),
        },
    ),
    "an entry of another release": (
        *(RUNS, told_by("kv_producer", stating(lambda identity: identity.replace(planet={"": "Mars"})))),
        {"identity, planet": (f"planet is Mars {ON_P}, none {ON_D}",)},
    ),
    "caches": (
        *(
            RUNS,
            told_by("kv_producer", lambda ours: with_regions(replace(ours, slot_bytes=0), dtype="bfloat16")),
        ),
        {"caches": (f"dtype is bfloat16 {ON_P}, ", "one of them has no slots")},
    ),
    # Nothing is computed with it.
    "an absurd table": (RUNS, told_by("kv_producer", absurd), {"caches": ("has impossible sizes",)}),
}


@pytest.mark.parametrize(("given", "told", "wrong"), APART.values(), ids=APART)
def test_what_keeps_two_nodes_apart_is_named(nodes, given, told, wrong):
    prefill, decode = nodes
    said = failures(asked(given or decode.given, prefill.address, **told))
    assert sorted(said) == sorted(wrong)
    assert not [text for about, texts in wrong.items() for text in texts if text not in said[about]], said


def test_another_key_is_named_with_what_to_compare_and_on_our_port_it_is_another_program(nodes, monkeypatch):
    prefill, _ = nodes
    monkeypatch.setenv("KVCONNECT_KEY", new_secret())
    said = failures(asked(CONSUMER, prefill.address))
    assert list(said) == ["peer"]
    assert "kvconnect keys show" in said["peer"]
    said = failures(asked(prefill.given))
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


def test_a_release_that_answers_no_questions_is_named(nodes, monkeypatch):
    former = messages.ToPrefill.__args__[:-2]
    decoders = {
        messages.Side.PREFILL: msgspec.msgpack.Decoder(former[0] | former[1]),
        messages.Side.DECODE: messages._decoders[messages.Side.DECODE],
    }
    monkeypatch.setattr(messages, "_decoders", decoders)
    said = failures(asked(CONSUMER, nodes[0].address))
    assert list(said) == ["release"]
    assert "install the same release" in said["release"]


def test_what_a_peer_writes_cannot_steer_the_terminal(capsys):
    doctor_runner._print([well("peer", "a\x1b[2Jb [red]c")])
    assert "\x1b[2J" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (f"127.0.0.1:{free_port()}", ("nothing listens", "not that of HTTP")),
        ("here", ("--peer is 'here'; accepted: HOST:PORT",)),
        ("http://127.0.0.1:9", ("does not show the metrics",)),
    ],
    ids=["closed", "no address", "HTTP"],
)
def test_a_peer_that_cannot_be_asked_is_a_failure_beside_all_others(given, names):
    said = asked(configured("kv_consumer", engine="memory", insecure=True), given)
    assert list(failures(said)) == ["peer"]
    assert all(name in failures(said)["peer"] for name in names)
    assert "Python" in said


@pytest.mark.usefixtures("nodes")
def test_a_rank_that_is_gone_is_named(node):
    prefill = node("kv_producer", ranks=2)
    prefill.workers[1].close()
    deadline = time.monotonic() + 5
    said = failures(asked(CONSUMER, prefill.address))
    assert time.monotonic() < deadline
    assert f"nothing listens at 127.0.0.1:{prefill.workers[1].address().port}" in said["peer"]
