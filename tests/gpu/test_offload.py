"""Copies between a GPU's blocks and rows of pinned host memory, against plain slices of copies."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.shard import HeadInterval
from kvconnect.offload.copies.copier import make_arena, make_copier
from kvconnect.offload.copies.rows import RowLayout
from kvconnect.transfer.orders import RowCopies
from tests.offload.rows_by_hand import Image, copy_back, copy_out, plan_rows, rows_of
from tests.pack.sides import Layer, Model, Shape, Side, models, shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_BLOCKS = 40
NUM_ROWS = 30


class Rig:
    """A cache on the GPU, rows, and a copier between them."""

    def __init__(self, side: Side, staging_bytes: int = 1 << 20) -> None:
        self.side, self.table = side, side.table
        self.layout = RowLayout.build(side.table)
        self.arena = make_arena(plan_rows(self.layout.row_bytes, NUM_ROWS), "cuda")
        self.copier = make_copier(self.layout, self.arena, "cuda", staging_bytes=staging_bytes)
        for group in self.layout.lanes:
            rows_of(self.arena, group)[:] = 0xA5
        torch.cuda.synchronize()

    def image(self) -> Image:
        torch.cuda.synchronize()
        return Image(self.table, self.side.tensors)

    def rows(self):
        return {group: rows_of(self.arena, group).copy() for group in self.layout.lanes}

    def check(self, image, rows) -> None:
        assert self.image().same_as(image)
        for group, wanted in rows.items():
            content = len(image.row(group, 1))
            assert np.array_equal(rows_of(self.arena, group)[:, :content], wanted[:, :content])

    def close(self) -> None:
        self.copier.close()
        self.arena.close()


def wide_side(tokens: int = 16) -> Side:
    """Pages of some KiB, in two groups of unlike layouts."""
    layers = (
        Layer("a", 0, "gqa", 128, torch.float16),
        Layer("b", 0, "gqa", 64, torch.float16),
        Layer("c", 1, "window", 64, torch.float16),
        Layer("d", 2, "state", 5001, torch.float16),
    )
    model = Model(layers, 4, 64, 64)
    layouts = {
        "a": "block token head",
        "b": "plane head block token",
        "c": "head block token",
        "d": "block",
    }
    shape = Shape(layouts, dict.fromkeys(layouts, 3), {0: tokens, 1: tokens, 2: 1}, {0: 1, 1: 2, 2: 1})
    return Side(model, shape, HeadInterval(0, 4), NUM_BLOCKS, 7)


def random_copies(rng: random.Random, group: int) -> RowCopies:
    count = rng.randint(1, NUM_ROWS)
    return RowCopies(
        group,
        tuple(rng.sample(range(1, NUM_BLOCKS), count)),
        tuple(rng.sample(range(NUM_ROWS), count)),
    )


@settings(max_examples=12)
@given(data=st.data())
def test_any_cache_goes_out_and_comes_back(data):
    model = data.draw(models())
    side = Side(model, data.draw(shapes(model)), HeadInterval(0, model.total_heads), NUM_BLOCKS, 1)
    there_and_back(Rig(side), random.Random(data.draw(st.integers(0, 999))))


@pytest.mark.parametrize("staging_bytes", [1 << 20, 0])
def test_wide_pages_go_out_and_come_back(staging_bytes):
    there_and_back(Rig(wide_side(), staging_bytes), random.Random(5))


def there_and_back(rig: Rig, rng: random.Random) -> None:
    for _ in range(2):
        image, rows = rig.image(), rig.rows()
        out = [random_copies(rng, group) for group in rig.layout.lanes]
        ticket = rig.copier.snapshot(out)
        ticket.wait()
        assert ticket.error is None
        copy_out(image, rows, out)
        rig.check(image, rows)
        back = [random_copies(rng, group) for group in rig.layout.lanes]
        ticket = rig.copier.restore(back, rig.copier.mark())
        ticket.wait()
        assert ticket.error is None
        copy_back(image, rows, back)
        rig.check(image, rows)
    rig.close()


def test_a_step_that_overwrites_blocks_at_once_changes_no_row():
    """Staging memory is far too small, and the model writes to every block right after each order."""
    rig = Rig(wide_side())
    rng, stream = random.Random(3), torch.cuda.Stream()
    image, rows = rig.image(), rig.rows()
    tickets = []
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for turn in range(6):
            for group in rig.layout.lanes:
                blocks = rng.sample(range(1, NUM_BLOCKS), 5)
                numbers = tuple(range(turn * 5, turn * 5 + 5))
                out = [RowCopies(group, tuple(blocks), numbers)]
                tickets.append(rig.copier.snapshot(out))
                copy_out(image, rows, out)
            for cache in rig.side.tensors.values():
                raw = cache.tensor.view(torch.uint8)
                raw.add_(turn + 1)
            image = shifted(rig, image, turn + 1)
        # Two requests get blocks that the model wrote to just now.
        rows_ready = [ticket for ticket in tickets if not (ticket.wait() or ticket.error)]
        assert len(rows_ready) == len(tickets)
        torch.cuda._sleep(20_000_000)
        for cache in rig.side.tensors.values():
            cache.tensor.view(torch.uint8).add_(9)
        image = shifted(rig, image, 9)
        mark = rig.copier.mark()
    back = [RowCopies(group, (7, 3), (0, 29)) for group in rig.layout.lanes]
    ticket = rig.copier.restore(back, mark)
    assert not ticket.done
    ticket.wait()
    assert ticket.error is None
    copy_back(image, rows, back)
    rig.check(image, rows)
    rig.close()


def shifted(rig: Rig, image: Image, by: int) -> Image:
    """The image after ``by`` was added to every byte of every tensor, padding left out."""
    for cache in rig.side.tensors.values():
        storage = cache.tensor.untyped_storage()
        raw = torch.from_numpy(image.storages[storage.data_ptr()])
        view = raw.view(cache.tensor.dtype).as_strided(
            cache.tensor.shape, cache.tensor.stride(), cache.tensor.storage_offset()
        )
        view.view(torch.uint8).add_(by)
    return image


def test_the_numbers_of_a_restore_lie_in_no_memory_that_the_model_still_reads():
    """What the model's stream freed is that stream's: kernels that read it may still be to run."""
    rig = Rig(wide_side())
    lengths = [512 << at for at in range(6)]
    seen = [torch.zeros(length, dtype=torch.int64, device="cuda") for length in lengths]
    used = [torch.full((length,), 7, dtype=torch.int64, device="cuda") for length in lengths]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for there, here in zip(seen, used, strict=True):
        there.copy_(here)
    del there, here
    used.clear()
    everything = [
        RowCopies(group, tuple(range(1, NUM_ROWS + 1)), tuple(range(NUM_ROWS))) for group in rig.layout.lanes
    ]
    ticket = rig.copier.restore(everything)
    ticket.wait()
    assert ticket.error is None
    torch.cuda.synchronize()
    assert all(bool((values == 7).all()) for values in seen)
    rig.close()


def test_waiting_for_staging_memory_is_timed():
    rig = Rig(wide_side())
    everything = RowCopies(0, tuple(range(1, 31)), tuple(range(30)))
    # The model keeps the device busy, so that nothing has left when the next order comes.
    torch.cuda._sleep(50_000_000)
    tickets = [rig.copier.snapshot([everything]) for _ in range(20)]
    for ticket in tickets:
        ticket.wait()
        assert ticket.error is None
    assert max(ticket.waited_s for ticket in tickets) > 0
    rig.close()


def test_orders_of_what_does_not_exist_end_and_the_rest_goes_on():
    rig = Rig(wide_side())
    for call in (rig.copier.snapshot, rig.copier.restore):
        for wrong in (
            RowCopies(0, (NUM_BLOCKS,), (0,)),
            RowCopies(0, (1,), (NUM_ROWS,)),
            RowCopies(9, (1,), (1,)),
        ):
            ticket = call([wrong])
            assert ticket.done
            assert ticket.error
    there_and_back(rig, random.Random(1))


def test_copies_across_pinned_pieces_are_right(monkeypatch):
    import kvconnect.offload.copies.rows as arenas

    init = arenas.RowArena.__init__
    monkeypatch.setattr(
        arenas.RowArena, "__init__", lambda self, plan, pinner: init(self, plan, pinner, 8192)
    )
    rig = Rig(wide_side())
    assert len(rig.arena.borders) > 10
    there_and_back(rig, random.Random(4))


def test_a_row_longer_than_staging_memory_travels_in_parts():
    layers = (Layer("a", 0, "state", 700_001, torch.float16),)
    shape = Shape({"a": "block"}, {"a": 3}, {0: 1}, {0: 1})
    side = Side(Model(layers, 1, 8, 8), shape, HeadInterval(0, 1), NUM_BLOCKS, 3)
    there_and_back(Rig(side), random.Random(6))
