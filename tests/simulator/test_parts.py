"""The simulated parts keep their own promises: a memory that tells every byte, a network like ZeroMQ's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvconnect.cache.specs import div_ceil
from kvconnect.errors import PeerError
from kvconnect.peer import messages as wire
from kvconnect.peer.channel import Frame, LinkLost
from kvconnect.peer.handles import Claims, Handles
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.messages import CreditGrant, Fetch, Landed, encode
from tests.simulator.content import Prompt
from tests.simulator.draw import draw_scenario
from tests.simulator.grants import Grants
from tests.simulator.lies import Liar
from tests.simulator.memory import RankMemory
from tests.simulator.network import Network, Weather
from tests.simulator.scenario import FORGERIES
from tests.simulator.shapes import MODELS, Shape
from tests.simulator.thieves import forged
from tests.simulator.world import START_S, World

TOKENS = 13


def memory_of(model, head_first: bool, rank: int = 0, world_size: int = 1) -> RankMemory:
    shape = Shape(4, 4 if model.has("state") else 2, head_first)
    node = draw_scenario(0, random.Random(0)).nodes[0]
    return RankMemory(replace(node, model=model, shape=shape, num_blocks=24, world_size=world_size), rank)


def blocks_of(model) -> list[list[int]]:
    ids = iter(range(23, 0, -2))
    return [
        [next(ids) for _ in range(1 if kind == "state" else div_ceil(TOKENS, 4))] for kind, _ in model.kinds
    ]


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_byte_of_a_request_is_looked_at(model, head_first):
    memory, prompt, ids = memory_of(model, head_first), Prompt(7, TOKENS, 1, 5), blocks_of(model)
    assert memory.difference(prompt, ids, TOKENS)
    memory.compute(prompt, ids, 0, 6)
    memory.compute(prompt, ids, 6, TOKENS)
    assert memory.difference(prompt, ids, TOKENS) == ""
    assert memory.difference(Prompt(8, TOKENS, 1, 5), ids, TOKENS)
    seen = 0
    for place in range(0, memory.page_bytes, 5):
        memory._bytes[place] ^= 0xFF
        touched = memory.blocks_at(memory.address + place, 1)
        if memory.difference(prompt, ids, TOKENS):
            seen += 1
            assert touched & {block for group in ids for block in group}
        memory._bytes[place] ^= 0xFF
    assert seen > 0.5 * sum(layer.row_bytes for layer in model.layers) / 5
    assert memory.difference(prompt, ids, TOKENS) == ""


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_block_that_changes_hands_holds_nobodys_content(model):
    memory, prompt, ids = memory_of(model, False), Prompt(7, TOKENS), blocks_of(model)
    memory.compute(prompt, ids, 0, TOKENS)
    memory.spoil([next(iter(range(1, 24, 2)))], 3)
    for group in ids:
        memory.compute(prompt, ids, 0, TOKENS)
        assert memory.difference(prompt, ids, TOKENS) == ""
        memory.spoil(group[-1:], 3)
        assert memory.difference(prompt, ids, TOKENS)


class Ends:
    """Two channels, and what arrived at each."""

    def __init__(self, seed: int, **weather) -> None:
        self.world = World(seed)
        self.network = Network(self.world, Weather(**weather))
        self.far = self.network.channel("P", lambda: None)
        self.near = self.network.channel("D", lambda: None)
        self.near.connect("a", "P", self.far.port)

    def run(self, seconds: float) -> None:
        self.world.after(seconds, lambda: None)
        self.world.run(self.world.now + seconds, 10_000)


@pytest.mark.parametrize("seed", range(5))
def test_a_connection_keeps_the_order_and_loses_nothing(seed):
    ends = Ends(seed, jitter_s=0.5, slow=0.5)
    for number in range(40):
        assert ends.near.send("a", bytes([number]))
        ends.run(0.01)
    ends.run(9.0)
    arrived = ends.far.receive()
    assert [frame.data[0] for frame in arrived] == list(range(40))
    (link,) = {frame.link for frame in arrived}
    assert ends.far.send(link, b"back")
    ends.run(5.0)
    assert ends.near.receive() == [Frame("a", b"back")]


@pytest.mark.parametrize("seed", range(5))
def test_partitions_keep_the_order_and_lose_nothing(seed):
    ends = Ends(seed, jitter_s=0.3, slow=0.5, heartbeat_s=100.0)
    ends.run(1.0)
    for number in range(60):
        if number % 5 == 2:
            ends.network.part("P", "D")
        elif number % 5 == 4:
            ends.network.join("P", "D")
        assert ends.near.send("a", bytes([number]))
        ends.run(0.2 * ends.world.random.random())
    ends.network.join("P", "D")
    ends.run(9.0)
    assert [frame.data[0] for frame in ends.far.receive()] == list(range(60))


@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_goes_on_hears_each_connection_in_order_and_others_before(seed):
    ends = Ends(seed)
    heard: list[tuple[str, int]] = []

    def hear() -> None:
        heard.extend((frame.link, frame.data[0]) for frame in ends.far.receive() if isinstance(frame, Frame))

    ends.near.connect("b", "P", ends.far.port)
    ends.run(0.5)
    first, other = ends.network.links_between(ends.near, ends.far)
    ends.far.stopped = True
    for number in range(3):
        ends.near.send("a", bytes([number]))
    ends.run(0.1)
    ends.far.go_on()
    for number in range(3, 30):
        if number == 10:
            # It is stopped once more, with something that it has not read.
            ends.far.go_on()
        ends.near.send("a", bytes([number]))
        ends.near.send("b", bytes([number]))
        ends.run(0.0005)
        hear()
    ends.run(1.0)
    hear()
    assert [number for link, number in heard if link == first] == list(range(30))
    assert [number for link, number in heard if link == other] == list(range(3, 30))
    assert heard[0][0] == other


def test_what_is_said_over_a_new_connection_does_not_overtake_the_news_of_the_loss():
    ends = Ends(1, delay_s=0.0005, jitter_s=0.0)
    ends.run(0.5)
    ends.near.stopped = True
    ends.network.cut(ends.network.connections[0])
    ends.run(0.5)
    ends.near.go_on()
    (link,) = ends.network.links_between(ends.near, ends.far)
    ends.far.send(link, b"who are you")
    ends.run(0.001)
    assert ends.near.receive() == []
    ends.run(0.5)
    assert ends.near.receive() == [LinkLost("a", PeerLoss.LINK_LOST), Frame("a", b"who are you")]


def test_a_break_loses_what_is_under_way_and_makes_another_link():
    ends = Ends(1, delay_s=0.1)
    ends.run(0.5)
    ends.near.send("a", b"arrives")
    ends.run(0.5)
    ends.near.send("a", b"is lost")
    ends.network.cut(ends.network.connections[0])
    ends.near.send("a", b"waits")
    ends.run(2.0)
    first, second = ends.far.receive()
    assert (first.data, second.data) == (b"arrives", b"waits")
    assert first.link != second.link
    assert not ends.far.send(first.link, b"to nobody")
    assert ends.near.receive() == [LinkLost("a", PeerLoss.LINK_LOST)]


def test_a_short_partition_delays_and_a_long_one_breaks():
    ends = Ends(1, heartbeat_s=2.0)
    ends.run(0.5)
    ends.network.part("P", "D")
    ends.near.send("a", b"late")
    ends.run(1.0)
    assert ends.far.receive() == []
    ends.network.join("P", "D")
    ends.run(0.5)
    assert [frame.data for frame in ends.far.receive()] == [b"late"]
    ends.network.part("P", "D")
    ends.near.send("a", b"never")
    ends.run(6.0)
    assert ends.near.receive() == [LinkLost("a", PeerLoss.LINK_LOST)]
    ends.network.join("P", "D")
    ends.run(2.0)
    assert ends.far.receive() == []


def test_a_killed_process_refuses_and_what_starts_at_its_port_is_another():
    ends = Ends(1, delay_s=0.1)
    ends.run(0.5)
    ends.near.send("a", b"to the dead")
    ends.network.kill(ends.far.port)
    ends.run(0.05)
    assert ends.near.receive() == [LinkLost("a", PeerLoss.PROCESS_GONE)]
    again = ends.network.channel("P", lambda: None, ends.far.port)
    ends.near.send("a", b"to the living")
    ends.run(2.0)
    assert [frame.data for frame in again.receive()] == [b"to the living"]
    assert ends.far.receive() == []


def test_time_does_not_go_back():
    world, seen = World(1), []
    for delay in (3.0, 1.0, 2.0):
        world.after(delay, lambda: seen.append(world.now - START_S))
    world.run(world.now + 10, 100)
    assert seen == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("secret", [b"", b"ours"])
@pytest.mark.parametrize("how", FORGERIES[1:])
def test_a_forged_handle_is_refused_and_the_one_that_it_was_made_of_is_not(how, secret):
    handles = Handles(secret, clock=lambda: START_S)
    claims = Claims("P0", "epoch", "name", 7, "P0", 1, START_S + 3.0)
    good = handles.make(claims)
    assert handles.read(good) == claims
    with pytest.raises(PeerError):
        handles.read(forged(good, how, secret, START_S))


def test_a_slot_is_used_once_and_by_whom_it_was_granted_to():
    grants = Grants()
    fetch = Fetch(5, "handle", 7, 1, 1.0, (), (wire.Grant(640, 64, 9), wire.Grant(704, 64, 10)))
    assert not grants.use(640)
    grants.said("a", encode(fetch))
    for link, transfer, generation in (("b", 5, 9), ("a", 6, 9), ("a", 5, 10)):
        grants.heard(link, encode(Landed(transfer, 0, generation, 64, None)))
    grants.heard("a", b"landed, but no message")
    assert [grants.use(704), grants.use(704)] == [True, False]
    assert not grants.use(640)
    grants.said("a", encode(CreditGrant(5, (wire.Grant(640, 64, 11),))))
    grants.heard("a", encode(Landed(5, 0, 9, 64, None)))
    assert not grants.use(640)


def test_a_liar_says_other_things_and_the_same_ones_from_the_same_seed():
    said = [encode(Landed(number, 0, 100 + number, 64, number)) for number in range(60)]

    def lies() -> list[list[tuple[float, bytes]]]:
        liar = Liar(random.Random(3), ("handle",))
        return [liar.instead_of(data, to_decode=True) for data in said]

    frames = [frame for told in lies() for _, frame in told]
    assert lies() == lies()
    assert len(said) / 2 < sum(frame in said for frame in frames)
    assert len({frame for frame in frames if frame not in said}) > 10
