"""Reading settings from JSON, of a text or a file: an error names the key, the value and what is accepted.

Of several mistakes all are named in one error: each start of a server that shows one of them costs a minute.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec

from kvconnect.errors import ConfigError

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Parsed = TypeVar("_Parsed")

_MOST_FILE_BYTES = 1 << 20
_UNREAD = object()
"""In place of a value that could not be read."""


def read_file(path: Path, parse: Callable[[Mapping[str, Any]], _Parsed]) -> _Parsed:
    """Parse the JSON object of a file. Raises ``ConfigError``, which names the file, if it cannot be used."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_FILE_BYTES + 1)
        if len(text) > _MOST_FILE_BYTES:
            raise ConfigError(f"it has more than {_MOST_FILE_BYTES} bytes")
        return parse(json_object(text, "it"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror or error}") from error


def json_object(text: str | bytes, where: str) -> Mapping[str, Any]:
    """The JSON object in a text, which errors call ``where``. Raises ``ConfigError``: there is none."""
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise ConfigError(f"{where} holds {type(decoded).__name__}; accepted: a JSON object")
    return decoded


def refuse(mistakes: Sequence[str]) -> None:
    """Raise ``ConfigError`` with all of these mistakes, if there are any."""
    if len(mistakes) > 1:
        listed = "".join(f"\n  {number}. {mistake}" for number, mistake in enumerate(mistakes, 1))
        raise ConfigError(f"there are {len(mistakes)} mistakes:{listed}")
    if mistakes:
        raise ConfigError(mistakes[0])


def read_struct(given: Any, kind: type[_Struct], where: str) -> _Struct:
    """A struct read from an object, checked field by field, nested objects too.

    Raises ``ConfigError``, which calls the object ``where``.
    """
    mistakes: list[str] = []
    read = read_what_can_be(given, kind, where, mistakes)
    refuse(mistakes)
    return read


def read_what_can_be(
    given: Any, kind: type[_Struct], where: str, mistakes: list[str], hidden: Sequence[str] = ()
) -> _Struct:
    """As ``read_struct``, but mistakes are added to the list, and nothing is raised.

    Fields in ``hidden`` are refused as unknown.

    A field that cannot be read has its default in the result, or None without one, so that the mistakes of
    other fields can be found.
    """
    if not isinstance(given, Mapping):
        mistakes.append(f"{where} is {given!r}, it must be an object of settings")
    elif missing := [
        field for field in msgspec.structs.fields(kind) if field.required and field.name not in given
    ]:
        mistakes += [
            f"{where}.{field.name} is missing; {_accepted(field.type) or 'it has no default'}"
            for field in missing
        ]
    items = given if isinstance(given, Mapping) else {}
    fields = {field.name: field for field in msgspec.structs.fields(kind) if field.name not in hidden}
    values: dict[str, Any] = {name: None for name, field in fields.items() if field.required}
    for key, value in items.items():
        name = f"{where}.{key}"
        if key in fields:
            read = _read_field(value, fields[key].type, name, mistakes, hidden)
            values |= {} if read is _UNREAD else {key: read}
            continue
        near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        mistakes.append(
            f"{where} has no key {key!r} (its value is {value!r}); {hint}accepted: {', '.join(fields)}"
        )
    return kind(**values)


def _read_field(value: Any, kind: Any, name: str, mistakes: list[str], hidden: Sequence[str]) -> Any:
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in options if value is not None else ():
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return read_what_can_be(value, option, name, mistakes, hidden)
    if get_origin(kind) is dict and isinstance(value, Mapping):
        of = get_args(kind)[1]
        read = {key: _read_field(one, of, f"{name}[{key!r}]", mistakes, hidden) for key, one in value.items()}
        return {key: one for key, one in read.items() if one is not _UNREAD}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        mistakes.append(f"{name} is {value!r}: {_accepted(kind) or error}")
        return _UNREAD


def _accepted(kind: Any) -> str:
    """The accepted values of a field with a closed set of them; empty for others."""
    described = msgspec.inspect.type_info(kind)
    options = getattr(described, "types", (described,))
    values = [
        str(value)
        for option in options
        if isinstance(option, msgspec.inspect.LiteralType)
        for value in option.values
    ]
    return f"accepted: {', '.join(values)}" if values else ""
