"""The Triton kernel that moves pages to and from a slot.

It addresses memory by absolute addresses. Its work is divided into items. An item is some pages of one lane,
and the same units of each of them. The offsets of the units in a page are computed once per item; after that
a page costs a block id and additions. Programs take items in turn, so any number of programs can do the work.

All numbers of a request's chunks are in one int64 tensor: for each chunk a row of ``FIELDS`` per batch, an
address and a place in the slot per lane, and block ids. Lanes whose values are cast have a third number.
The pages of a lane follow each other in a slot. If they are ``PLACED``, the numbers after the block ids are
their places; so the same kernel packs the chunks of a transfer and the rows of an offload.
Casts are arithmetic on bits, since not every device has the dtypes; ``casts.py`` defines them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvconnect.pack.digest import MULTIPLIER, STEP

_STEP, _MULTIPLIER = tl.constexpr(STEP), tl.constexpr(MULTIPLIER)


@triton.jit
def word_pointer(address, BYTES: tl.constexpr):
    """Pointers to words of ``BYTES`` bytes (8, 4, 2 or 1) at these addresses."""
    # Triton's interpreter keeps an address below 2**32 in 32 bits, in spite of annotations; sums are of 64.
    address = address.to(tl.int64) + 0
    if BYTES == 8:
        pointer = address.to(tl.pointer_type(tl.uint64))
    elif BYTES == 4:
        pointer = address.to(tl.pointer_type(tl.uint32))
    elif BYTES == 2:
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return pointer


@triton.jit
def _mix(x):
    x = x ^ (x >> 32)
    x = x * _MULTIPLIER
    return x ^ (x >> 32)


@triton.jit
def _mixed_sum(words, live):
    # One thread has all words of a unit: summing them first halves the accumulated values.
    return tl.sum(tl.where(live, _mix(words), 0), axis=2)


@triton.jit
def _load_words(address, mask, WORD: tl.constexpr, MEMORY: tl.constexpr, UNIT: tl.constexpr):
    """Load words as uint64, from smaller pieces where memory is not aligned to words."""
    step: tl.constexpr = MEMORY if MEMORY < WORD else WORD
    lanes = tl.arange(0, UNIT // WORD)[None, None, :]
    if step == WORD:
        pointer = tl.multiple_of(word_pointer(address, WORD), [1, 1, UNIT]) + lanes
        words = tl.load(pointer, mask=mask, other=0, eviction_policy="evict_first").to(tl.uint64)
    else:
        pointer = word_pointer(address, step) + lanes * (WORD // step)
        words = tl.load(pointer, mask=mask, other=0).to(tl.uint64)
        for part in tl.static_range(1, WORD // step):
            piece = tl.load(pointer + part, mask=mask, other=0).to(tl.uint64)
            words = words | (piece << (8 * step * part))
    return words


@triton.jit
def _store_words(address, words, mask, WORD: tl.constexpr, MEMORY: tl.constexpr, UNIT: tl.constexpr):
    step: tl.constexpr = MEMORY if MEMORY < WORD else WORD
    lanes = tl.arange(0, UNIT // WORD)[None, None, :]
    if step == WORD:
        pointer = tl.multiple_of(word_pointer(address, WORD), [1, 1, UNIT]) + lanes
        tl.store(pointer, words.to(pointer.dtype.element_ty), mask=mask)
    else:
        pointer = word_pointer(address, step) + lanes * (WORD // step)
        for part in tl.static_range(WORD // step):
            piece = (words >> (8 * step * part)).to(pointer.dtype.element_ty)
            tl.store(pointer + part, piece, mask=mask)


@triton.jit
def _fields_of(item, table, num_batches, FIELDS: tl.constexpr):
    """Pointer to the fields of the batch that an item belongs to."""
    batch = 0
    for other in range(1, num_batches):
        batch += (item >= tl.load(table + other * FIELDS)).to(tl.int32)
    return table + batch * FIELDS


@triton.jit
def _item_of(item, fields, num_pages, PLACED: tl.constexpr):
    """An item's lane in its batch, its tile of units, its first page, and the page after its last one."""
    place = item - tl.load(fields).to(tl.int32)
    outer = tl.load(fields + 1).to(tl.int32)
    inner = tl.load(fields + 2).to(tl.int32)
    first = place // outer
    second = (place % outer) // inner
    third = place % inner
    lane, tile, turn = (second, third, first) if PLACED else (first, second, third)
    pages_per_item = tl.load(fields + 3).to(tl.int32)
    first_page = turn * pages_per_item
    return lane, tile, first_page, tl.minimum(first_page + pages_per_item, num_pages)


@triton.jit
def _sizes(fields):
    """The fields that all pages of a batch share."""
    num_pages = tl.load(fields + 6).to(tl.int32)
    lead = tl.load(fields + 7).to(tl.int32)
    rows = tl.load(fields + 8).to(tl.int32)
    tokens = tl.load(fields + 9).to(tl.int32)
    units = tl.load(fields + 10).to(tl.int32)
    block_stride = tl.load(fields + 11)
    wire_token = tl.load(fields + 12).to(tl.int32)
    return num_pages, lead, rows, tokens, units, block_stride, wire_token


@triton.jit
def _offsets(fields, unit, wire_token, FLAT: tl.constexpr, UNIT: tl.constexpr, MEMORY: tl.constexpr):
    """Offsets of each unit of a page: its token, bytes in the page, units in its head, units on the wire.

    ``UNIT`` is the size of a unit in memory, in bytes.
    """
    if FLAT:
        token = tl.zeros_like(unit)
        memory_offset = unit * UNIT
        wire_offset = unit
        in_head = unit
    else:
        run = tl.load(fields + 13).to(tl.int32)
        planes = tl.load(fields + 14).to(tl.int32)
        heads = tl.load(fields + 15).to(tl.int32)
        within = unit % run
        token = unit // run
        plane = token % planes
        token = token // planes
        head = token % heads
        token = token // heads
        plane_stride = tl.load(fields + 16).to(tl.int32)
        head_stride = tl.load(fields + 17).to(tl.int32)
        token_stride = tl.load(fields + 18).to(tl.int32)
        wire_head = tl.load(fields + 19).to(tl.int32)
        # Strides count ``MEMORY`` bytes, the alignment, so that the compiler can see the alignment.
        memory_offset = plane * plane_stride + head * head_stride + token * token_stride
        memory_offset = memory_offset * MEMORY + within * UNIT
        wire_offset = (token * wire_token + head * wire_head) + (plane * run + within)
        in_head = plane * run + within
    return token, memory_offset.to(tl.int64)[None, :, None], in_head, wire_offset.to(tl.int64)[None, :, None]


@triton.jit
def _in_chunk(
    page, last, lead, rows, tokens, token, valid, wire_token, places, PLACED: tl.constexpr, UNIT: tl.constexpr
):
    """The mask of units that travel, and each page's offset on the wire of its lane, in units."""
    row = lead + page * tokens
    at_row = row[:, None] + token[None, :]
    live = (page < last)[:, None] & valid[None, :] & (at_row >= 0) & (at_row < rows)
    if PLACED:
        page_wire = tl.load(places + page, mask=page < last, other=0) // UNIT
    else:
        page_wire = row.to(tl.int64) * wire_token
    return live[:, :, None], page_wire[:, None, None]


@triton.jit
def _from_bits(bits, TYPE: tl.constexpr):
    """The float32 values of bits of dtype ``TYPE``."""
    if TYPE == "bfloat16":
        value = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif TYPE == "float16":
        value = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        bits = bits.to(tl.uint32)
        size = bits & 0x7F
        # The exponent bias is 7 in fp8 and 127 in float32. Subnormal fp8 values are multiples of 2**-9.
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
        signed = value.to(tl.uint32, bitcast=True) | ((bits & 0x80) << 24)
        value = tl.where(size == 0x7F, 0x7FC00000, signed).to(tl.uint32).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _to_bits(value, TYPE: tl.constexpr):
    """The bits, as uint32, of the value of dtype ``TYPE`` that is nearest to a float32."""
    bits = value.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    if TYPE == "bfloat16":
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        made = tl.where(size > 0x7F800000, 0x7FC0, nearest)
    elif TYPE == "float16":
        nearest = value.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        made = tl.where(size > 0x7F800000, 0x7E00, nearest)
    else:
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # At 2**14 the steps of float32 are 2**-9, so the addition rounds as subnormal fp8 values need.
        raised = size.to(tl.float32, bitcast=True) + 16384.0
        small = raised.to(tl.uint32, bitcast=True) - 0x46800000
        nearest = tl.where(size < 0x3C800000, small, normal)
        nearest = tl.where(size >= 0x43E00000, 0x7E, nearest) | ((bits >> 24) & 0x80)
        made = tl.where(size > 0x7F800000, 0x7F, nearest)
    return made.to(tl.uint32)


@triton.jit
def _scale_of_values(lane, fields, in_head, UNIT: tl.constexpr, WIRE_TYPE: tl.constexpr):
    """The scale of K or V for each value of each unit; 1 if the wire is not fp8, which alone has scales."""
    if WIRE_TYPE == "float8_e4m3fn":
        both = tl.load(lane + 2).to(tl.uint64, bitcast=True)
        of_key = both.to(tl.uint32).to(tl.float32, bitcast=True)
        of_value = (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
        key_values = tl.load(fields + 20).to(tl.int32)
        value = in_head[None, :, None] * UNIT + tl.arange(0, UNIT)[None, None, :]
        scale = tl.where(value < key_values, of_key, of_value)
    else:
        scale = 1.0
    return scale


@triton.jit
def _move_words(
    in_slot,
    in_memory,
    live,
    kept,
    scale,
    PACK: tl.constexpr,
    UNIT: tl.constexpr,
    WORD: tl.constexpr,
    MEMORY: tl.constexpr,
    MEMORY_TYPE: tl.constexpr,
    WIRE_TYPE: tl.constexpr,
):
    """Move the ``live`` units; only ``kept`` ones have a page. Returns the words of the slot as uint64."""
    if WIRE_TYPE is not None:
        memory_item: tl.constexpr = 1 if MEMORY_TYPE == "float8_e4m3fn" else 2
        item: tl.constexpr = 1 if WIRE_TYPE == "float8_e4m3fn" else 2
        lanes = tl.arange(0, WORD // item)[None, None, :]
        shift = (lanes * (8 * item)).to(tl.uint64)
        pointer = tl.multiple_of(word_pointer(in_memory, memory_item), [1, 1, MEMORY]) + lanes
        if PACK:
            value = _from_bits(tl.load(pointer, mask=kept, other=0), MEMORY_TYPE)
            if WIRE_TYPE == "float8_e4m3fn":
                value = tl.div_rn(value, scale)
            bits = _to_bits(value, WIRE_TYPE).to(tl.uint64)
            words = tl.sum(bits << shift, axis=2)[:, :, None]
            _store_words(in_slot, words, live, WORD, WORD, WORD)
        else:
            words = _load_words(in_slot, live, WORD, WORD, WORD)
            value = _from_bits((words >> shift) & ((1 << (8 * item)) - 1), WIRE_TYPE)
            if WIRE_TYPE == "float8_e4m3fn":
                value = value * scale
            bits = _to_bits(value, MEMORY_TYPE)
            tl.store(pointer, bits.to(pointer.dtype.element_ty), mask=kept)
    elif PACK:
        words = _load_words(in_memory, kept, WORD, MEMORY, UNIT)
        _store_words(in_slot, words, live, WORD, WORD, UNIT)
    else:
        words = _load_words(in_slot, live, WORD, WORD, UNIT)
        _store_words(in_memory, words, kept, WORD, MEMORY, UNIT)
    return words


# No specialisation on numbers that differ between chunks: a new value must not cause a compilation.
@triton.jit(do_not_specialize=["batches_at", "num_batches", "num_items", "slot", "seed"])
def move_kernel(
    numbers,
    batches_at,
    num_batches,
    num_items,
    slot: tl.int64,
    sums,
    seed: tl.int64,
    PACK: tl.constexpr,
    DIGEST: tl.constexpr,
    PLACED: tl.constexpr,
    FLAT: tl.constexpr,
    UNIT: tl.constexpr,
    WORD: tl.constexpr,
    MEMORY: tl.constexpr,
    MEMORY_TYPE: tl.constexpr,
    WIRE_TYPE: tl.constexpr,
    PAGES: tl.constexpr,
    UNITS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    WORDS: tl.constexpr = UNIT // WORD
    WIDER: tl.constexpr = 2 if WIRE_TYPE == "float8_e4m3fn" else 1
    NUMBERS: tl.constexpr = 2 if WIRE_TYPE is None else 3
    word_of_unit = tl.arange(0, WORDS)[None, None, :].to(tl.uint64)
    table = numbers + batches_at
    sum_of_words = tl.zeros((PAGES, UNITS), tl.uint64)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        fields = _fields_of(item, table, num_batches, FIELDS)
        num_pages, lead, rows, tokens, units, block_stride, wire_token = _sizes(fields)
        lane_of_item, tile, first, last = _item_of(item, fields, num_pages, PLACED)
        lane = numbers + tl.load(fields + 4) + lane_of_item * NUMBERS
        blocks = numbers + tl.load(fields + 5)
        address = tl.load(lane)
        wire = tl.load(lane + 1)

        unit = tile * UNITS + tl.arange(0, UNITS)
        # Unpacked in one statement: Triton 3.2 has no tuple variables.
        token, unit_memory, in_head, unit_wire = _offsets(
            fields, unit, wire_token, FLAT, UNIT * WIDER, MEMORY
        )
        scale = _scale_of_values(lane, fields, in_head, UNIT, WIRE_TYPE)
        unit_key = unit_wire.to(tl.uint64) * WORDS * _STEP + word_of_unit * _STEP
        page = first + tl.arange(0, PAGES)
        next_block = tl.load(blocks + page, mask=page < last, other=0)
        for start in range(first, last, PAGES):
            page = start + tl.arange(0, PAGES)
            # Prefetch: block ids of the next pages are loaded while these pages move.
            block = next_block
            next_block = tl.load(blocks + page + PAGES, mask=page + PAGES < last, other=0)
            places, valid = blocks + num_pages, unit < units
            live, page_wire = _in_chunk(
                page, last, lead, rows, tokens, token, valid, wire_token, places, PLACED, UNIT
            )
            page_wire += wire
            in_slot = slot + (page_wire + unit_wire) * UNIT
            in_memory = (address + block * block_stride)[:, None, None] + unit_memory
            kept = live & (block > 0)[:, None, None]
            words = _move_words(
                in_slot, in_memory, live, kept, scale, PACK, UNIT, WORD, MEMORY, MEMORY_TYPE, WIRE_TYPE
            )
            if DIGEST:
                key = page_wire.to(tl.uint64) * WORDS * _STEP + seed.to(tl.uint64)
                sum_of_words += _mixed_sum(words + (key + unit_key), live)
    if DIGEST:
        # Relaxed: the sum is read only after the kernel.
        tl.atomic_add(sums, tl.sum(sum_of_words).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["host", "length"])
def load_kernel(device, host: tl.int64, length, COUNT: tl.constexpr):
    """Copy ``length`` int64 numbers from pinned host memory to the device."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    live = at < length
    tl.store(device + at, tl.load(word_pointer(host, 8) + at, mask=live), mask=live)
