"""The identity of KV: everything but the tokens that KV bytes depend on.

``ENTRIES`` is the one list of it. A serving stack states a value for each entry. Every check whether KV is
compatible compares these values: the greeting of peers, fetches by name, handles, and the namespaces of disk
and store. An entry that a peer states and that is not in the list must be equal.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

MARK_BYTES = 3
"""Digest bytes per entry in a handle: enough to name an entry that differs; the greeting compares all."""
_LONGEST_TEXT, _SHOWN_TEXT, _MOST_SHOWN = 160, 96, 6
_DEFAULT, _NOTE = "default ", "\x1f"

Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=_LONGEST_TEXT)]
Fields = Annotated[dict[Name, Text], msgspec.Meta(max_length=8192)]


class Rule(enum.Enum):
    """How the values of two sides are compared."""

    EQUAL = "must be equal"
    BRIDGED = "may differ, and is bridged"
    FREE = "does not matter"


class Entry(NamedTuple):
    """An entry of the identity. ``what`` describes its content for people, and how it is bridged.

    ``flags``: the options of a server that set it, where it must be equal.
    """

    name: str
    rule: Rule
    what: str
    flags: str = ""


MODEL, DTYPE, CACHE_DTYPE, WEIGHTS = "model", "dtype", "cache dtype", "weights"
ENTRIES = (
    Entry(MODEL, Rule.EQUAL, "the class that computes", "--model"),
    Entry("configuration", Rule.EQUAL, "each of its fields, as it was derived", "--model, --hf-overrides"),
    Entry("settings", Rule.EQUAL, "each setting that is not at its default", "the flag of that name"),
    Entry(
        "attention",
        Rule.EQUAL,
        "of each layer its kind, window, chunk, scale, soft cap and sinks",
        "--model, --hf-overrides, --disable-sliding-window",
    ),
    Entry(
        "rotary",
        Rule.EQUAL,
        "cosines and sines at fixed positions, and the choice of long factors",
        "--hf-overrides, --max-model-len",
    ),
    Entry("quantization", Rule.EQUAL, "method and content, also of online quantization", "--quantization"),
    Entry(
        DTYPE, Rule.EQUAL, "of activations, and so of states; `convert_dtype` bridges 16-bit ones", "--dtype"
    ),
    Entry(
        CACHE_DTYPE,
        Rule.EQUAL,
        "as resolved, by layer; `convert_dtype` bridges what it converts",
        "--kv-cache-dtype",
    ),
    Entry(
        "page order",
        Rule.EQUAL,
        "where in a page the backend puts known keys and values, by layer",
        "--attention-backend; --block-size where it cannot divide pages",
    ),
    Entry(
        "states",
        Rule.EQUAL,
        "shapes, types and layout of recurrent states over the whole model",
        "--mamba-cache-dtype",
    ),
    Entry(
        "ranks",
        Rule.EQUAL,
        "the number of ranks, where a layer can only travel between equal ones",
        "--tensor-parallel-size",
    ),
    Entry(WEIGHTS, Rule.EQUAL, "samples of every tensor, and embeddings whole", "--model, --revision"),
    Entry(
        "adapters",
        Rule.EQUAL,
        "of the request's adapter every byte, and its configuration",
        "--lora-modules",
    ),
    Entry("draft", Rule.BRIDGED, "weights and configuration: its layers are left out where they differ"),
    Entry(
        "names", Rule.BRIDGED, "how blocks are named: under other names nothing is pulled, or found in a tier"
    ),
    Entry(
        "block size", Rule.BRIDGED, "of the scheduler and of kernels, where the backend's pages can be cut"
    ),
    Entry("layout", Rule.BRIDGED, "order of heads, tokens and layers in memory"),
    Entry("parallelism", Rule.BRIDGED, "tensor, pipeline, data and decode context parallel sizes"),
    Entry("scales", Rule.BRIDGED, "of K and V in fp8, with `convert_dtype`; else they must be equal"),
    Entry("cache groups", Rule.BRIDGED, "how layers are grouped, as with the hybrid manager off"),
)
_RULES = {entry.name: entry.rule for entry in ENTRIES}
_FLAGS = {entry.name: entry.flags for entry in ENTRIES}
_MARKED = tuple(entry.name for entry in ENTRIES if entry.rule is Rule.EQUAL and entry.name != WEIGHTS)


class Identity(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The fields of each entry of ``ENTRIES`` as text; an entry with a single value has it under ``""``.

    A value that is the default of its field is written ``default VALUE``: it equals a missing field, so that
    a release without the field is compatible.
    """

    entries: Annotated[dict[Name, Fields], msgspec.Meta(max_length=64)] = {}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Identity:
        """The identity with these JSON values by entry: each a mapping of fields, or a single value."""
        return cls({name: _fields(value) for name, value in values.items()})

    def replace(self, **values: Any) -> Identity:
        """A copy with new values for some entries."""
        return Identity({**self.entries, **Identity.of(values).entries})

    @property
    def weights(self) -> Mapping[str, str]:
        """The names of the weights by the way they were made, such as ``files``; see ``weights_differ``."""
        return self.entries.get(WEIGHTS, {})

    @functools.cached_property
    def marks(self) -> bytes:
        """A digest of ``MARK_BYTES`` per entry that must be equal; empty if there are no entries.

        The weights are left out, since they may be replaced while a handle is valid.
        """
        return b"".join(self._mark(name) for name in _MARKED) if self.entries else b""

    @functools.cached_property
    def digest(self) -> str:
        """A digest, in hex, of the entries that must be equal and of the weights; empty without entries."""
        if not self.entries:
            return ""
        weights = json.dumps(sorted(self.facts.get(WEIGHTS, {}).items()))
        return hashlib.blake2b(self.marks + weights.encode(), digest_size=16).hexdigest()

    def _mark(self, name: str) -> bytes:
        fields = self.entries.get(name, {})
        stated = sorted(
            (field, _compared(text)) for field, text in fields.items() if not text.startswith(_DEFAULT)
        )
        return hashlib.blake2b(json.dumps(stated).encode(), digest_size=MARK_BYTES).digest()

    @property
    def facts(self) -> dict[str, dict[str, str]]:
        """Every value as in the namespaces of disk and store; weights with ``files`` omit ``tensors``."""
        facts = {
            name: {field: _compared(text) for field, text in fields.items()}
            for name, fields in self.entries.items()
        }
        if facts.get(WEIGHTS, {}).get("files"):
            facts[WEIGHTS].pop("tensors", None)
        return facts

    def text(self, name: str) -> str:
        """An entry in one line, for people."""
        fields = self.entries.get(name, {})
        if len(fields) > _MOST_SHOWN:
            return f"{len(fields)} fields"
        return ", ".join(f"{field} {_shown(value)}".strip() for field, value in fields.items()) or "nothing"


def marks_differ(ours: bytes, theirs: bytes) -> list[str]:
    """The names of the entries in which two ``marks`` differ; none if one of them is empty."""
    if not ours or not theirs:
        return []
    at = {name: slice(MARK_BYTES * number, MARK_BYTES * (number + 1)) for number, name in enumerate(_MARKED)}
    return [name for name, part in at.items() if ours[part] != theirs[part]]


def differences(prefill: Identity, decode: Identity) -> list[str]:
    """The fields that must be equal and differ between a prefill and a decode node, with both values.

    A cache dtype that only follows the model's is no difference of its own.
    """
    names = [*_RULES, *prefill.entries, *decode.entries]
    equal = [name for name in dict.fromkeys(names) if _RULES.get(name, Rule.EQUAL) is Rule.EQUAL]
    if entry_differs(DTYPE, prefill, decode) and all(_follows_dtype(side) for side in (prefill, decode)):
        equal.remove(CACHE_DTYPE)
    return [found for name in equal for found in entry_differs(name, prefill, decode)]


def _follows_dtype(identity: Identity) -> bool:
    entries = identity.entries
    return {*entries.get(CACHE_DTYPE, {}).values()} == {*entries.get(DTYPE, {}).values()}


def models_differ(prefill: Identity, decode: Identity) -> list[str]:
    """What the two sides call their models, where only these names differ."""
    shown = [_shown(side.entries.get(MODEL, {}).get("")) for side in (prefill, decode)]
    if shown[0] == shown[1] or entry_differs(MODEL, prefill, decode):
        return []
    return [_two(MODEL, MODEL, *shown)]


def entry_differs(name: str, prefill: Identity, decode: Identity) -> list[str]:
    """The fields of one entry that differ, with both values."""
    if name == WEIGHTS:
        return weights_differ(prefill.weights, decode.weights)
    return _fields_differ(name, prefill.entries.get(name, {}), decode.entries.get(name, {}))


def weights_differ(prefill: Mapping[str, str], decode: Mapping[str, str]) -> list[str]:
    """The names of the weights that differ between two nodes, with both values.

    ``files`` names a checkpoint. ``tensors`` names the weights in memory, which also depends on their layout
    there; it is compared only where a side has no ``files``. ``embeddings`` are compared where both sides
    keep them in the same dtype, which is the first word of the name.
    """
    sides = prefill, decode
    by_tensors = any(side.get("tensors") for side in sides) and not all(side.get("files") for side in sides)
    found = _fields_differ(WEIGHTS, *(_only(side, "tensors" if by_tensors else "files") for side in sides))
    rows = [side.get("embeddings", "") for side in sides]
    if all(rows) and len({row.partition(" ")[0] for row in rows}) == 1:
        found += _fields_differ(WEIGHTS, *({"embeddings": row} for row in rows))
    return found


def shown(found: Iterable[str]) -> str:
    """The first few differences, in one line."""
    listed = list(found)
    more = f"; and {len(listed) - _MOST_SHOWN} more" if len(listed) > _MOST_SHOWN else ""
    return "; ".join(listed[:_MOST_SHOWN]) + more


def default(value: Any) -> str:
    """The text of a value that is the default of its field; see ``Identity``."""
    return _cut(_DEFAULT + _text(value))


def noted(value: str, note: str) -> str:
    """A value with a note for people, which comparisons ignore."""
    return f"{value}{_NOTE}{note}"


def _compared(text: str) -> str:
    return text.removeprefix(_DEFAULT).partition(_NOTE)[0]


def _shown(text: str | None) -> str:
    if text is None:
        return "none"
    value, _, note = text.partition(_NOTE)
    return f"{note} ({value})" if note else value


def _only(fields: Mapping[str, str], name: str) -> dict[str, str]:
    return {name: fields[name]} if fields.get(name) else {}


def _fields_differ(entry: str, prefill: Mapping[str, str], decode: Mapping[str, str]) -> list[str]:
    found = []
    for field in sorted(prefill.keys() | decode.keys()):
        values = prefill.get(field), decode.get(field)
        stated = [_compared(value) for value in values if value is not None]
        if len(stated) == 2 and stated[0] == stated[1]:
            continue
        if len(stated) == 1 and any(value is not None and value.startswith(_DEFAULT) for value in values):
            continue
        found.append(_two(entry, f"{entry}.{field}" if field else entry, *map(_shown, values)))
    return found


def _two(entry: str, name: str, prefill: str, decode: str) -> str:
    flags = f" ({_FLAGS[entry]})" if _FLAGS.get(entry) else ""
    return f"{name} is {prefill} on the prefill node, {decode} on the decode node{flags}"


def _fields(value: Any) -> dict[str, str]:
    given = value if isinstance(value, Mapping) else {"": value}
    return {str(name): _cut(_text(field)) for name, field in given.items()}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text.encode("utf-8", "backslashreplace").decode()


def _cut(text: str) -> str:
    """The text, or if it is too long, its beginning and a digest of the whole."""
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_SHOWN_TEXT]}... ({hashlib.blake2b(text.encode(), digest_size=16).hexdigest()})"


class Naming(msgspec.Struct, frozen=True, array_like=True):
    """How a node names KV: ``hashing`` is the hash function and seed, with one name per ``tokens`` tokens.

    Names of two nodes can be compared only if both fields are equal.
    """

    hashing: Annotated[str, msgspec.Meta(max_length=256)]
    tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**20)]


MAX_NAMES = 1 << 16
"""The most names of one prefix: a million tokens in blocks of 16."""


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """The first tokens of a prompt by name: ``names[i]`` covers the first ``(i + 1) * naming.tokens`` tokens.

    The first ``start_tokens``, a whole number of names, are not requested.
    """

    naming: Naming
    start_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    names: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)], ...],
        msgspec.Meta(max_length=MAX_NAMES),
    ]
