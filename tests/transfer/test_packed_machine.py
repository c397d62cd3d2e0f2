"""Whatever happens, in whatever order: slots add up, nothing is reported twice, what is good is exact."""

from __future__ import annotations

import random

import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from kvconnect.config import ExtraConfig
from kvconnect.peer.messages import Fetch, Landed, Written
from tests.transfer.kernels import SlowKernels
from tests.transfer.pair import FakeWorker, Pair

P_BLOCKS, D_BLOCKS = 300, 310
STEPS = 60
WEIGHTS = {
    "ask": 7,
    "all work": 6,
    "one works": 8,
    "time passes": 2,
    "prefill ends": 3,
    "abort": 2,
    "engine fails": 2,
    "engine stalls": 1,
    "engine goes on": 2,
    "late writes land": 1,
    "network fails": 0.4,
    "network works": 1,
    "message is lost": 0.3,
    "inbound_peers are forgotten": 0.3,
    "kernels stall": 2,
    "kernels go on": 1,
    "kernel ends": 4,
}


class Chaos:
    """Two prefill nodes and a decode node. Kernels, engines and the network work, or they do not."""

    def __init__(self, seed: int, packs: SlowKernels, unpacks: SlowKernels) -> None:
        self.random = random.Random(seed)
        self.packs, self.unpacks = self.kernels = packs, unpacks
        config = ExtraConfig(
            num_slots=self.random.randint(1, 4), load_timeout_s=20, lease_s=15, peer_timeout_s=6
        )
        shared = self.random.random() < 0.3
        self.pair = Pair(config, prefill_blocks=P_BLOCKS, decode_blocks=D_BLOCKS, shared=shared)
        self.other = self.pair.add("Q")
        self.blocks: dict[str, tuple[tuple[int, ...], tuple[int, ...], FakeWorker]] = {}
        self.truth: dict[str, torch.Tensor] = {}
        self.held: list[str] = []
        self.reused: set[str] = set()
        self.reported: dict[str, torch.Tensor] = {}
        self.next_block = 1

    def step(self) -> None:
        (what,) = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        note(what)
        getattr(self, what.replace(" ", "_"))()
        self.check()

    def any_prefill_node(self) -> FakeWorker:
        return self.random.choice([self.pair.prefill, self.other])

    # Orders

    def ask(self) -> None:
        """A request is fetched, perhaps before it is prefilled."""
        count = self.random.randint(1, 12)
        if self.next_block + count >= P_BLOCKS:
            return
        name, node = f"r{len(self.blocks)}", self.any_prefill_node()
        source = tuple(range(self.next_block, self.next_block + count))
        target = tuple(block + 9 for block in reversed(source))
        self.next_block += count
        self.blocks[name] = (source, target, node)
        self.truth[name] = bits(node, source)
        if self.random.random() < 0.8:
            self.prefill(name)
        self.pair.load(name, target, engine_id=node.engine_id, port=node.channel.port)

    def prefill(self, name: str) -> None:
        source, _, node = self.blocks[name]
        self.held.append(name)
        self.pair.hold(name, source, worker=node)

    def prefill_ends(self) -> None:
        for name in sorted(set(self.blocks) - set(self.held)):
            self.prefill(name)

    def abort(self) -> None:
        under_way = sorted(set(self.blocks) - set(self.reported))
        if under_way:
            self.pair.abort(self.random.choice(under_way))

    # What may go wrong

    def engine_fails(self) -> None:
        engine = self.any_prefill_node().engine
        faults = [
            lambda: engine.fail_next(quiescent=True),
            lambda: engine.cut_next(self.random.randint(0, 800)),
            lambda: engine.delay_next(self.random.choice([0.5, 5.0])),
            lambda: engine.corrupt_next(self.random.randint(0, 800)),
            lambda: engine.fail_next(quiescent=False),
        ]
        self.random.choice(faults)()

    def engine_stalls(self) -> None:
        self.any_prefill_node().engine.hold()

    def engine_goes_on(self) -> None:
        self.any_prefill_node().engine.release()

    def late_writes_land(self) -> None:
        """However late they are, with whatever lies in the slots that they are read from by now."""
        node = self.any_prefill_node()
        if node.engine._late:
            for slot in node.send.slots:
                if slot.state.name in ("FREE", "QUARANTINED"):
                    node.arenas[1].view(slot.address, slot.length_bytes).random_()
            node.engine.land_late()

    def network_fails(self) -> None:
        self.pair.cut(self.any_prefill_node())

    def network_works(self) -> None:
        self.pair.mend(self.any_prefill_node())

    def message_is_lost(self) -> None:
        self.pair.network.lose(self.random.choice([Fetch, Landed, Written]), times=1)

    def inbound_peers_are_forgotten(self) -> None:
        prefill = self.any_prefill_node().transfers.prefill
        in_use = {link for link, _ in prefill.sender.sendings}
        for link in [link for link in prefill.inbound_peers._peers if link not in in_use]:
            del prefill.inbound_peers._peers[link]

    # Progress

    def kernels_stall(self) -> None:
        self.random.choice(self.kernels).slow = True

    def kernels_go_on(self) -> None:
        kernels = self.random.choice(self.kernels)
        kernels.slow = False
        kernels.finish()

    def kernel_ends(self) -> None:
        self.random.choice(self.kernels).finish(1)

    def one_works(self) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.random.choice(self.pair.workers).step(self.pair.clock.now)

    def all_work(self) -> None:
        self.pair.run(self.random.choice([0.0, 0.1, 1.0]), step_s=0.5)

    def time_passes(self) -> None:
        self.pair.run(self.random.choice([5.0, 12.0, 45.0]), step_s=2.0)

    # What always holds

    def check(self) -> None:
        """Blocks that were reported are somebody else's: P's are written, D's are watched."""
        for worker in self.pair.workers:
            worker.check_slots()
        decode = self.pair.decode
        for name in decode.received:
            _, target, _ = self.blocks[name]
            if name not in self.reported:
                assert not self.unpacks.touched() & {*target}, f"{name} is reported while it is unpacked"
                self.reported[name] = bits(decode, target)
                exact = torch.equal(self.reported[name], self.truth[name])
                assert name in decode.failed or exact, f"{name} is not exact"
            untouched = torch.equal(bits(decode, target), self.reported[name])
            assert untouched, f"{name} was written to after its report"
        for name in set(self.held) & set(self.pair.prefill.sent + self.other.sent) - self.reused:
            source, _, node = self.blocks[name]
            assert not self.packs.touched() & {*source}, f"{name} is reported while it is packed"
            node.storage[:, list(source)] = torch.randn(1).to(torch.float16)
            self.reused.add(name)

    def end(self) -> None:
        """All works again: whatever was ordered is reported, and nothing is remembered."""
        for kernels in self.kernels:
            kernels.slow = False
        for node in (self.pair.prefill, self.other):
            self.pair.mend(node)
            node.engine.release()
        for _ in range(60):
            for kernels in self.kernels:
                kernels.finish()
            self.pair.run(2.0, step_s=2.0)
            self.check()
        assert sorted(self.pair.decode.received) == sorted(self.blocks)
        assert sorted(self.pair.prefill.sent + self.other.sent) == sorted(self.held)
        self.pair.assert_idle()


def bits(worker: FakeWorker, blocks: tuple[int, ...]) -> torch.Tensor:
    """What is in some blocks; a copy. As bits, since noise need not be a number."""
    return worker.storage[:, list(blocks)].view(torch.int16)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_slots_add_up_reports_come_once_and_what_is_good_is_exact(seed):
    with SlowKernels("source") as packs, SlowKernels("target") as unpacks:
        packs.slow = unpacks.slow = False
        chaos = Chaos(seed, packs, unpacks)
        for _ in range(STEPS):
            chaos.step()
        chaos.end()
