"""The wire: the format of the bytes of a packed transfer, independent of the page layout of either side.

Both workers of a pair compute the same wire, a list of streams, in one of two orders. In the order ``rows`` a
stream is a layer: one row per token, with the heads that both sides keep, and for each head K before V. The
wire is then independent of block sizes, kernel splits and the order of axes. In the order ``pages`` a stream
is a region and a row is a whole page, unchanged; both sides must have equal pages. In the order ``rows`` the
two sides may keep a layer in different dtypes if the configuration permits: see ``Conversion``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvconnect.cache.region_table import UNSCALED, Region, RegionTable, Scales
from kvconnect.cache.shard import HeadInterval
from kvconnect.errors import LayoutError

ORDERS = ("pages", "rows")
CANNOT_MATCH = "the two caches cannot be matched: "


ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""The types that can be converted into each other, with the bytes of a value."""
SCALED = "float8_e4m3fn"
"""The one of these types that has scales: a stored value stands for ``value * scale``."""


class Conversion(msgspec.Struct, frozen=True, array_like=True):
    """The dtypes of a layer on both sides and on the wire, which carries the narrower one.

    So the side with the wider type converts, with the other side's ``scales``, one for K and one for V. A
    ``float8_e4m3fn`` cache stores ``x / scale``, rounded to nearest, ties to even, and clamped to +-448;
    ``UNSCALED`` if neither side is fp8. The first ``key_values`` values of a head belong to K, the others
    to V.
    """

    source_dtype: str
    target_dtype: str
    wire_dtype: str
    key_values: int
    scales: Scales


class WireStream(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one layer on the wire; in the order ``pages``, the pages of one region.

    A row stands for ``row_tokens`` tokens and has ``width_bytes``: ``head_bytes`` for each of ``heads``,
    or all bytes of the row where pages cannot be divided by head. A state has one row for the whole
    request. ``first_plane`` distinguishes regions in the order ``pages``. ``word_bytes`` is the largest
    power of two up to 8 that divides every run of bytes on either side; digests are made of such words.
    With a ``conversion`` all sizes count bytes of the type that travels.
    """

    layer: str
    source_group: int
    target_group: int
    is_state: bool
    first_plane: int
    heads: HeadInterval | None
    row_tokens: int
    head_bytes: int
    width_bytes: int
    word_bytes: int
    conversion: Conversion | None = None


class Wire(msgspec.Struct, frozen=True, array_like=True):
    """The streams of a pair of workers, in their order on the wire."""

    order: str
    streams: tuple[WireStream, ...]


def align_wire(
    source: RegionTable, target: RegionTable, order: str | None = None, convert: bool = False
) -> Wire:
    """The wire of two workers. With ``order`` None it is ``pages`` where pages are equal, else ``rows``.

    With ``convert`` token rows of different dtypes are converted where possible, in the order ``rows``. Both
    sides must pass the same arguments. Raises ``LayoutError``, which lists why layers cannot be matched.
    """
    if order != "rows" and (wire := _page_wire(source, target)) is not None:
        return wire
    if order == "pages":
        raise LayoutError(f"{CANNOT_MATCH}their pages are not alike")
    refusals: dict[str, list[str]] = {}
    wire = _row_wire(source, target, convert, refusals)
    if refusals:
        reasons = (f"{_named(layers)}: {reason}" for reason, layers in refusals.items())
        raise LayoutError(CANNOT_MATCH + "; ".join(reasons))
    return wire


def _named(layers: Sequence[str]) -> str:
    count = f" to {layers[-1][:200]!r} ({len(layers)})" if len(layers) > 1 else ""
    return f"layer{'s' * bool(count)} {layers[0][:200]!r}{count}"


def _page_wire(source: RegionTable, target: RegionTable) -> Wire | None:
    """A stream per region; None unless both sides' pages are equal. The gaps between pages may differ."""
    ours = {(region.layer, region.first_plane, region.heads): region for region in source.regions}
    source_groups, target_groups = source.geometry(), target.geometry()
    streams = []
    for theirs in target.regions:
        region = ours.get((theirs.layer, theirs.first_plane, theirs.heads))
        if region is None or (region.dtype, region.axes, region.scales) != (
            theirs.dtype,
            theirs.axes,
            theirs.scales,
        ):
            return None
        tokens = [
            1 if group.is_state else group.block_tokens
            for group in (source_groups[region.group], target_groups[theirs.group])
        ]
        state = target_groups[theirs.group].is_state
        if tokens[0] != tokens[1] or source_groups[region.group].is_state != state:
            return None
        streams.append(
            WireStream(
                layer=theirs.layer,
                source_group=region.group,
                target_group=theirs.group,
                is_state=state,
                first_plane=theirs.first_plane,
                heads=theirs.heads,
                row_tokens=tokens[1],
                head_bytes=theirs.page_bytes,
                width_bytes=theirs.page_bytes,
                word_bytes=math.gcd(8, theirs.page_bytes),
            )
        )
    return Wire("pages", tuple(streams))


@dataclass(frozen=True)
class _LayerRows:
    """One side of a layer, with only the properties that matter to the wire."""

    group: int
    dtype: str
    is_state: bool
    heads: HeadInterval | None
    undivided_heads: int
    row_tokens: int | None
    stored: str
    is_undivided: bool
    head_bytes: int
    piece_bytes: int
    key_bytes: int
    scales: Scales


def _layer_rows(table: RegionTable) -> dict[str, _LayerRows]:
    groups = table.geometry()
    parts: dict[str, list[Region]] = {}
    for region in table.regions:
        parts.setdefault(region.layer, []).append(region)
    made = {}
    for layer, regions in parts.items():
        first, geometry = regions[0], groups[regions[0].group]
        spans = [region.heads for region in regions if region.heads is not None]
        planes = max(region.first_plane + region.axes.planes for region in regions)
        tokens = geometry.block_tokens
        whole = geometry.is_state or tokens % first.axes.tokens == 0
        made[layer] = _LayerRows(
            group=first.group,
            dtype=first.dtype,
            is_state=geometry.is_state,
            heads=HeadInterval(min(h.start for h in spans), max(h.stop for h in spans)) if spans else None,
            undivided_heads=first.axes.heads,
            row_tokens=(1 if geometry.is_state else tokens // first.axes.tokens) if whole else None,
            stored=f"{tokens} tokens" + f" in {first.axes.tokens} rows" * (first.axes.tokens > 1),
            is_undivided=first.axes.tokens == 1 < tokens,
            head_bytes=planes * first.axes.row_bytes,
            piece_bytes=first.axes.row_bytes,
            key_bytes=first.axes.row_bytes if first.key_bytes is None else first.key_bytes,
            scales=first.scales,
        )
    return made


def _row_wire(
    source: RegionTable, target: RegionTable, convert: bool, refusals: dict[str, list[str]]
) -> Wire:
    """A stream per layer, in the target's order. ``refusals`` gets the layers by reason."""
    ours = _layer_rows(source)
    streams = []
    for layer, theirs in _layer_rows(target).items():
        mine = ours.get(layer)
        if mine is None:
            refusals.setdefault("the prefill node has none of it", []).append(layer)
            continue
        converted = convert and mine.dtype != theirs.dtype
        refusal = _row_refusal(mine, theirs) or (
            _conversion_refusal(mine, theirs) if converted else _bytes_refusal(mine, theirs)
        )
        if refusal:
            refusals.setdefault(refusal, []).append(layer)
            continue
        streams.append(_row_stream(layer, mine, theirs, converted))
    return Wire("rows", tuple(streams))


def _conversion(source: _LayerRows, target: _LayerRows) -> Conversion:
    narrower = ITEM_BYTES[target.dtype] < ITEM_BYTES[source.dtype]
    scaled = target if target.dtype == SCALED else source
    is_scaled = SCALED in (source.dtype, target.dtype)
    return Conversion(
        source_dtype=source.dtype,
        target_dtype=target.dtype,
        # Of two equally wide types the source's travels: the target, which waits for the bytes, converts.
        wire_dtype=target.dtype if narrower else source.dtype,
        key_values=scaled.key_bytes // ITEM_BYTES[SCALED] if is_scaled else 0,
        scales=scaled.scales if is_scaled else UNSCALED,
    )


def _row_stream(layer: str, source: _LayerRows, target: _LayerRows, converted: bool) -> WireStream:
    heads, conversion = None, None
    if source.heads is not None and target.heads is not None:
        heads = source.heads.intersect(target.heads)
    head_bytes = target.head_bytes
    word_bytes = math.gcd(8, source.piece_bytes, target.piece_bytes)
    if converted:
        conversion = _conversion(source, target)
        item = ITEM_BYTES[conversion.wire_dtype]
        head_bytes = head_bytes // ITEM_BYTES[target.dtype] * item
        values = (side.piece_bytes // ITEM_BYTES[side.dtype] for side in (source, target))
        word_bytes = math.gcd(8, *(item * count for count in values))
    return WireStream(
        layer=layer,
        source_group=source.group,
        target_group=target.group,
        is_state=target.is_state,
        first_plane=0,
        heads=heads,
        row_tokens=target.row_tokens or 1,
        head_bytes=head_bytes,
        width_bytes=head_bytes * (target.undivided_heads if heads is None else len(heads)),
        word_bytes=word_bytes,
        conversion=conversion,
    )


def _row_refusal(source: _LayerRows, target: _LayerRows) -> str | None:
    if source.is_state != target.is_state:
        return f"it is {_kind(source)} on the prefill node, {_kind(target)} on the decode node"
    if (source.heads is None) != (target.heads is None):
        side = "prefill" if source.heads is None else "decode"
        return (
            f"the {side} node's pages cannot be divided by head, the other's can: serve both with the same "
            "attention backend (--attention-backend)"
        )
    if source.heads is None and source.undivided_heads != target.undivided_heads:
        return (
            f"pages cannot be divided by head, and hold {source.undivided_heads} heads on the prefill node, "
            f"{target.undivided_heads} on the decode node: set the same --tensor-parallel-size"
        )
    if source.heads is not None and target.heads is not None and not source.heads.intersect(target.heads):
        return "the prefill node's rank has none of the heads that the decode node's keeps"
    if source.row_tokens is None or source.row_tokens != target.row_tokens:
        return _rows_refusal(source, target)
    return None


def _kind(side: _LayerRows) -> str:
    return "a recurrent state" if side.is_state else "rows of tokens"


def _rows_refusal(source: _LayerRows, target: _LayerRows) -> str:
    sides = f"{source.stored} on the prefill node, {target.stored} on the decode node"
    if source.is_undivided and target.is_undivided:
        return (
            f"the block size is {sides}, and the attention backend's pages cannot be divided by token: "
            "set the same --block-size on both"
        )
    return f"it is stored as {sides}: serve both with the same attention backend and --block-size"


def _bytes_refusal(source: _LayerRows, target: _LayerRows) -> str | None:
    """Why rows cannot travel without conversion; None if they can."""
    for what, ours, theirs, remedy in (
        ("dtype is", source.dtype, target.dtype, "set the same --kv-cache-dtype and --dtype on both"),
        ("scales of K and V are", source.scales, target.scales, "serve the same checkpoint on both"),
        (
            "a head and token have",
            f"{source.head_bytes} bytes",
            f"{target.head_bytes} bytes",
            "serve the same model, with the same attention backend",
        ),
    ):
        if ours == theirs:
            continue
        if what == "dtype is" and _conversion_refusal(source, target) is None:
            remedy += ", or convert_dtype: true"
        return f"{what} {ours} on the prefill node, {theirs} on the decode node: {remedy}"
    return None


def _conversion_refusal(source: _LayerRows, target: _LayerRows) -> str | None:
    """Why the values of rows of two dtypes cannot be converted one by one; None if they can."""
    if not {source.dtype, target.dtype} <= ITEM_BYTES.keys():
        return (
            f"dtype is {source.dtype} on the prefill node, {target.dtype} on the decode node; accepted: two "
            f"of {', '.join(ITEM_BYTES)}; rows of another type (fp8_ds_mla keeps scales inside them) are not "
            "converted: set the same --kv-cache-dtype"
        )
    if source.is_state:
        return (
            f"dtype is {source.dtype} on the prefill node, {target.dtype} on the decode node; it keeps "
            "state, and only rows of tokens are converted: set the same --mamba-cache-dtype"
        )
    counts = []
    for side in (source, target):
        values, rest = divmod(side.piece_bytes, ITEM_BYTES[side.dtype])
        counts.append(0 if rest else values * (side.head_bytes // side.piece_bytes))
    if counts[0] != counts[1] or not counts[0]:
        return (
            f"a head and row have {counts[0]} values of {source.dtype} on the prefill node, {counts[1]} of "
            f"{target.dtype} on the decode node; rows with more than values in them (as fp8_ds_mla's) are "
            "not converted: set the same --kv-cache-dtype"
        )
    return None
