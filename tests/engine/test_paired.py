"""Two engines joined to one, with memory engines for both: nothing here needs a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.engine import paired, registry
from kvconnect.engine.base import Batch, Capabilities, Engine, Span, Verb
from kvconnect.engine.ipc import UnshareableError
from kvconnect.engine.memory import MemoryEngine
from kvconnect.engine.paired import DirectCard, PairedEngine, direct_part, join_cards
from kvconnect.engine.process import ProcessIdentity
from kvconnect.errors import ConfigError, EngineError, LocalError
from kvconnect.testing.engine_buffers import Buffer, HostBuffer
from kvconnect.testing.engine_suite import EngineSuite

PAGE = 256
GPU = "cuda:0"


class Double(MemoryEngine):
    """A memory engine of another name, which takes memory for a GPU's. ``used`` are the batches it got."""

    def __init__(self, name: str, listen: bool = False, **bounds: int) -> None:
        super().__init__(listen=listen, **bounds)
        self._capabilities = replace(self._capabilities, name=name, device_memory=True)
        self.used: list[int] = []
        self.registered: list[Span] = []
        self.refuses: Exception | None = None
        self.refuses_peers = False

    def register(self, spans):
        if self.refuses is not None:
            raise self.refuses
        super().register([replace(span, device="cpu") for span in spans])
        self.registered += spans

    def unregister(self, spans):
        super().unregister([replace(span, device="cpu") for span in spans])
        self.registered = [span for span in self.registered if span not in spans]

    def connect(self, peer, card):
        if self.refuses_peers:
            raise EngineError("no way to that GPU")
        super().connect(peer, card)

    def submit(self, batch):
        super().submit(batch)
        self.used.append(batch.batch_id)


class GpuBuffer(HostBuffer):
    device = GPU


def make_engine() -> Engine:
    return PairedEngine(Double("memory", listen=True), Double("nvlink", listen=True))


def on_gpu(content: np.ndarray) -> Buffer:
    return GpuBuffer(content)


class TestPairedEngineDirect(EngineSuite):
    """Every batch takes the direct engine."""

    make_engine = staticmethod(make_engine)
    allocate = staticmethod(on_gpu)
    allocate_peer = staticmethod(on_gpu)
    settle_s = 1.0


class Side:
    """One paired engine in this process, with a page buffer on the GPU and one on the host."""

    def __init__(self, pages: int = 8, seed: int = 1) -> None:
        self.network, self.direct = Double("memory"), Double("nvlink")
        self.engine = PairedEngine(self.network, self.direct)
        rng = np.random.default_rng(seed)
        self.gpu, self.host = (
            kind(rng.integers(0, 256, pages * PAGE, dtype=np.uint8)) for kind in (GpuBuffer, HostBuffer)
        )
        self.spans = [Span(part.address, pages * PAGE, part.device) for part in (self.gpu, self.host)]

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    here, there = Side(seed=1), Side(seed=2)
    yield here, there
    here.close()
    there.close()


def batch(
    batch_id: int, here: list[int], there: list[int], verb: Verb = Verb.WRITE, size: int = PAGE
) -> Batch:
    near, far = (np.array(column, dtype=np.int64) for column in (here, there))
    source, target = (near, far) if verb is Verb.WRITE else (far, near)
    return Batch(batch_id, "peer", verb, source, target, np.full(len(near), size), 5.0)


def run(side: Side, *batches: Batch) -> dict[int, bool]:
    """Submit and poll until all are answered; every one once, and none that was not asked for."""
    for one in batches:
        side.engine.submit(one)
    answers: dict[int, bool] = {}
    for _ in range(10):
        for ended in side.engine.poll():
            assert ended.batch_id not in answers
            answers[ended.batch_id] = ended.ok
    assert set(answers) == {one.batch_id for one in batches}
    return answers


# ---- which way a batch goes


def test_gpu_memory_goes_directly_and_the_hosts_over_the_network(sides: tuple[Side, Side]) -> None:
    here, there = sides
    for side in sides:
        side.engine.register(side.spans)
        assert side.direct.registered == side.spans[:1]
        assert side.network.registered == side.spans
    here.engine.connect("peer", there.engine.card())
    ways = {
        1: ([here.gpu.address], [there.gpu.address]),
        2: ([here.host.address], [there.host.address]),
        3: ([here.gpu.address, here.host.address], [there.gpu.address + PAGE, there.gpu.address + 2 * PAGE]),
        4: ([here.gpu.address, here.gpu.address], [there.gpu.address + PAGE, there.host.address]),
        5: ([], []),
    }
    assert all(run(here, *(batch(number, *columns) for number, columns in ways.items())).values())
    assert (here.direct.used, here.network.used) == ([1, 5], [2, 3, 4])
    assert np.array_equal(there.gpu.read()[:PAGE], here.gpu.read()[:PAGE])
    assert np.array_equal(there.gpu.read()[2 * PAGE : 3 * PAGE], here.host.read()[:PAGE])
    assert not run(here, batch(6, [here.gpu.address], [1 << 45]))[6]


def test_a_peer_without_the_direct_engine_is_reached_over_the_network(sides: tuple[Side, Side]) -> None:
    """Both ways: a plain engine reads a joined card, and a paired one a plain card."""
    here, there = sides
    here.engine.register(here.spans[:1])
    plain = Double("memory")
    plain.register(there.spans[:1])
    here.engine.connect("peer", plain.card())
    assert run(here, batch(1, [here.gpu.address], [there.gpu.address])) == {1: True}
    assert here.network.used == [1]
    plain.connect("peer", here.engine.card())
    back = batch(1, [there.gpu.address + PAGE], [here.gpu.address + PAGE])
    plain.submit(back)
    assert [ended.ok for ended in plain.poll()] == [True]
    assert np.array_equal(here.gpu.read()[PAGE : 2 * PAGE], there.gpu.read()[PAGE : 2 * PAGE])
    plain.close()


@pytest.mark.parametrize("reason", ["host", "unknown host", "name", "refused", "no GPU memory", "nonsense"])
def test_where_the_direct_way_is_closed_the_network_is_taken(
    sides: tuple[Side, Side], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = sides
    here.engine.register(here.spans)
    there.engine.register(there.spans[1:] if reason == "no GPU memory" else there.spans)
    card = there.engine.card()
    if reason == "host":
        card = changed(card, host="another boot")
    elif reason == "unknown host":
        monkeypatch.setattr(paired, "own_identity", lambda: ProcessIdentity("", 1, ""))
        card = changed(card, host="")
    elif reason == "name":
        card = changed(card, engine="infiniband")
    elif reason == "nonsense":
        card = msgspec.msgpack.encode({**msgspec.msgpack.decode(card), "direct": [1, 2, 3]})
    elif reason == "refused":
        here.direct.refuses_peers = True
    with caplog.at_level(logging.INFO, "kvconnect.engine.paired"):
        for _ in range(3):
            here.engine.connect("peer", card)
    assert here.engine.capabilities_of("peer") == here.engine.capabilities
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1, "the choice is told once"
    assert "memory" in told[0]
    if reason != "no GPU memory":
        assert run(here, batch(1, [here.gpu.address], [there.gpu.address])) == {1: True}
        assert here.network.used == [1]


def changed(card: bytes, **fields: Any) -> bytes:
    direct = direct_part(card)
    assert direct is not None
    return join_cards(card, msgspec.structs.replace(direct, **fields))


def test_cards_of_every_engine_can_be_joined() -> None:
    direct = DirectCard("nvlink", "here", b"\x00\xff", [(1, 2)], True)
    engines = [MemoryEngine()]
    for name in ("nixl", "mooncake"):
        if not registry.available_engines()[name]:
            engines.append(registry.create_engine(name, host="127.0.0.1"))
    for engine in engines:
        plain = engine.card()
        joined = join_cards(plain, direct)
        assert direct_part(joined) == direct
        assert direct_part(plain) is None
        if engine.capabilities.name != "nixl":  # an agent cannot be its own peer
            engine.connect("self", joined)
    for engine in engines:
        engine.close()
    if any(engine.capabilities.name == "nixl" for engine in engines):
        from kvconnect.engine.nixl_peer import decode_card, encode_card

        plain = encode_card(b"metadata", [Span(4096, 4096)])
        assert decode_card("peer", join_cards(plain, direct)) == decode_card("peer", plain)
    with pytest.raises(EngineError, match="without fields"):
        join_cards(msgspec.msgpack.encode([1]), direct)


def test_a_batch_is_cancelled_on_the_engine_that_has_it(sides: tuple[Side, Side]) -> None:
    here, there = sides
    for side in sides:
        side.engine.register(side.spans)
    here.engine.connect("peer", there.engine.card())
    here.direct.hold()
    here.network.hold()
    here.engine.submit(batch(1, [here.gpu.address], [there.gpu.address]))
    here.engine.submit(batch(2, [here.host.address], [there.host.address]))
    assert here.engine.poll() == []
    for batch_id in (1, 2):
        here.engine.cancel(batch_id)
        assert [(ended.batch_id, ended.ok) for ended in here.engine.poll()] == [(batch_id, False)]
    here.engine.cancel(1)
    assert here.engine.poll() == []


# ---- what both must agree on


def test_what_one_refuses_is_registered_with_none(sides: tuple[Side, Side]) -> None:
    here, _ = sides
    here.direct.refuses = EngineError("out of handles")
    with pytest.raises(EngineError, match="out of handles"):
        here.engine.register(here.spans)
    assert here.network.registered == here.direct.registered == []
    here.direct.refuses, here.network.refuses = None, EngineError("out of keys")
    with pytest.raises(EngineError, match="out of keys"):
        here.engine.register(here.spans)
    assert here.network.registered == here.direct.registered == []
    here.network.refuses = None
    here.engine.register(here.spans)
    with pytest.raises(EngineError, match="no such span"):
        here.engine.unregister([here.spans[0], Span(4096, 4096)])
    assert here.direct.registered == here.spans[:1]
    here.engine.unregister(here.spans)
    assert here.network.registered == here.direct.registered == []
    assert direct_part(here.engine.card()) is None


def test_memory_that_cannot_be_shared_is_reached_over_the_network(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = sides
    here.direct.refuses = UnshareableError("expandable_segments")
    here.engine.register(here.spans)
    assert "expandable_segments" in caplog.text
    there.engine.register(there.spans)
    here.engine.connect("peer", there.engine.card())
    there.engine.connect("peer", here.engine.card())
    assert run(here, batch(1, [here.gpu.address], [there.gpu.address])) == {1: True}
    assert here.network.used == [1]


def test_bounds_are_the_tighter_ones_and_wider_where_all_goes_directly() -> None:
    sides = []
    for _ in range(2):
        side = Side()
        side.network = Double("memory", max_copies=2, max_bytes=4 * PAGE, max_batches_per_peer=3)
        side.direct = Double("nvlink", max_copies=5, max_bytes=3 * PAGE, max_batches_per_peer=2)
        side.engine = PairedEngine(side.network, side.direct)
        sides.append(side)
    here, there = sides
    tight: Capabilities = here.engine.capabilities
    assert (tight.max_copies, tight.max_bytes, tight.max_batches_per_peer) == (2, 3 * PAGE, 2)
    assert tight.name == "memory"
    for side in sides:
        side.engine.register(side.spans[:1])
    here.engine.connect("peer", there.engine.card())
    wide = here.engine.capabilities_of("peer")
    assert (wide.name, wide.max_copies, wide.max_bytes) == ("memory", 5, 3 * PAGE)
    assert here.engine.capabilities_of("nobody") == tight
    many = [here.gpu.address] * 5, [there.gpu.address + PAGE * number for number in range(5)]
    assert run(here, batch(1, *many, size=PAGE // 2)) == {1: True}
    # As soon as anything may have to go over the network, its bounds hold.
    here.engine.register(here.spans[1:])
    assert here.engine.capabilities_of("peer") == tight
    with pytest.raises(LocalError, match="copies"):
        here.engine.submit(batch(2, *many, size=PAGE // 2))
    for side in sides:
        side.engine.close()


# ---- peers that come, go and come back


def test_a_failed_connect_leaves_no_half_known_peer(sides: tuple[Side, Side]) -> None:
    here, there = sides
    for side in sides:
        side.engine.register(side.spans)
    here.engine.connect("peer", there.engine.card())
    with pytest.raises(EngineError):
        here.engine.connect("peer", b"garbage")
    for engine in (here.engine, here.network, here.direct):
        with pytest.raises(LocalError, match="no such peer"):
            engine.submit(batch(1, [here.gpu.address], [there.gpu.address]))


def test_a_peer_that_returns_with_another_card_is_reached_anew(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = sides
    for side in sides:
        side.engine.register(side.spans)
    caplog.set_level(logging.INFO, "kvconnect.engine.paired")
    here.engine.connect("peer", there.engine.card())
    here.direct.hold()
    here.engine.submit(batch(1, [here.gpu.address], [there.gpu.address]))
    plain = Double("memory")
    plain.register(there.spans)
    here.engine.connect("peer", plain.card())
    here.direct.release()
    assert [(ended.batch_id, ended.ok) for ended in here.engine.poll()] == [(1, False)]
    assert run(here, batch(2, [here.gpu.address], [there.gpu.address])) == {2: True}
    here.engine.connect("peer", there.engine.card())
    assert run(here, batch(3, [here.gpu.address], [there.gpu.address])) == {3: True}
    assert (here.direct.used, here.network.used) == ([1, 3], [2])
    assert [record.args[1] for record in caplog.records] == ["nvlink", "memory", "nvlink"]
    plain.close()


STEPS = st.lists(
    st.sampled_from(
        [
            "gpu",
            "host",
            "mixed",
            "stray",
            "cancel",
            "disconnect",
            "plain",
            "joined",
            "hold",
            "release",
            "poll",
        ]
    ),
    max_size=25,
)


@settings(max_examples=150)
@given(STEPS)
def test_every_batch_is_answered_once_whatever_happens(steps: list[str]) -> None:
    here, there = Side(seed=1), Side(seed=2)
    for side in (here, there):
        side.engine.register(side.spans)
    cards: Mapping[str, bytes] = {"joined": there.engine.card(), "plain": there.network.card()}
    asked: set[int] = set()
    answered: list[int] = []
    here.engine.connect("peer", cards["joined"])
    columns = {
        "gpu": ([here.gpu.address], [there.gpu.address]),
        "host": ([here.host.address], [there.host.address]),
        "mixed": ([here.gpu.address, here.host.address], [there.gpu.address, there.host.address]),
        "stray": ([here.gpu.address], [1 << 45]),
    }
    for number, step in enumerate(steps):
        if step in columns:
            one = batch(number, *columns[step])
            try:
                here.engine.submit(one)
            except LocalError:
                continue
            asked.add(number)
        elif step == "cancel":
            here.engine.cancel(max(asked, default=0))
        elif step == "disconnect":
            here.engine.disconnect("peer")
        elif step in cards:
            here.engine.connect("peer", cards[step])
        elif step == "poll":
            answered += [ended.batch_id for ended in here.engine.poll()]
        else:
            getattr(here.direct, step)()
            getattr(here.network, step)()
    here.close()
    answered += [ended.batch_id for ended in here.engine.poll()]
    assert sorted(answered) == sorted(asked)
    there.close()


# ---- the registry


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine on which NIXL and NVLink work, as the registry sees it."""
    made: dict[str, Any] = {"nvlink problem": ""}

    def maker(name: str):
        def make(host: str, protocol: str, options: dict[str, Any]) -> Engine:
            made[name] = options
            return Double(name)

        return make

    monkeypatch.setattr(registry, "_MAKERS", {name: maker(name) for name in ("nixl", "nvlink")})
    problems = {name: lambda: "" for name in ("nixl", "mooncake", "memory")}
    problems["nvlink"] = lambda: made["nvlink problem"]
    monkeypatch.setattr(registry, "_PROBLEM", problems)
    return made


def test_auto_joins_nvlink_and_says_so(doubles: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvconnect.engine"):
        engine = registry.create_engine(
            "auto", host="h", options={"settle_s": 2.0, "nvlink": {"max_programs": 16}}
        )
    assert isinstance(engine, PairedEngine)
    assert engine.capabilities.name == "nixl"
    assert (doubles["nixl"], doubles["nvlink"]) == ({"settle_s": 2.0}, {"max_programs": 16})
    assert "joins 'nvlink' to 'nixl'" in caplog.text
    engine.close()


def test_auto_joins_nothing_where_it_is_switched_off_or_does_not_work(doubles: dict[str, Any]) -> None:
    for problem, options in (("", {"nvlink": False}), ("no GPU", {}), ("no GPU", {"nvlink": {"x": 1}})):
        doubles["nvlink problem"] = problem
        engine = registry.create_engine("auto", host="h", options=options)
        assert isinstance(engine, Double)
        engine.close()
    assert "nvlink" not in doubles
    doubles["nvlink problem"] = ""
    with pytest.raises(ConfigError, match="engine_options.nvlink is 7"):
        registry.create_engine("auto", host="h", options={"nvlink": 7})
    plain = registry.create_engine("nixl", host="h")
    assert isinstance(plain, Double)
    plain.close()
