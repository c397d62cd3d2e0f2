"""Reading settings from JSON, of a text or a file: an error names the key, the value and what is accepted."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvconnect.errors import ConfigError

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Parsed = TypeVar("_Parsed")

_MOST_FILE_BYTES = 1 << 20


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
    """The JSON object that a text, ``where`` it is, holds. Raises ``ConfigError``: it holds none."""
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise ConfigError(f"{where} holds {type(decoded).__name__}; accepted: a JSON object")
    return decoded


def read_struct(given: Mapping[str, Any], kind: type[_Struct], where: str) -> _Struct:
    """What was read of an object, checked field by field. Raises ``ConfigError``, where it is ``where``."""
    refuse_unknown(given, kind, where)
    return read_fields(given, kind, where)


def refuse_unknown(
    given: Mapping[str, Any], kind: type[msgspec.Struct], where: str, hidden: Sequence[str] = ()
) -> None:
    """Raise ``ConfigError`` for a key that is no field; fields that are ``hidden`` are none here."""
    known = [name for name in kind.__struct_fields__ if name not in hidden]
    for key, value in given.items():
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{where} has no key {key!r} (its value is {value!r}); {hint}accepted: {', '.join(known)}"
        )


def read_fields(given: Mapping[str, Any], kind: type[_Struct], where: str) -> _Struct:
    """The struct of those keys that are its fields, one by one: an error names the key and the value."""
    values = {}
    for field in msgspec.structs.fields(kind):
        if field.name not in given:
            if field.required:
                raise ConfigError(f"{where}.{field.name} is missing; it has no default")
            continue
        value = given[field.name]
        try:
            values[field.name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}.{field.name} is {value!r}: {_accepted(field.type, error)}") from error
    return kind(**values)


def _accepted(kind: Any, error: msgspec.ValidationError) -> str:
    described = msgspec.inspect.type_info(kind)
    options = getattr(described, "types", (described,))
    values = [
        str(value)
        for option in options
        if isinstance(option, msgspec.inspect.LiteralType)
        for value in option.values
    ]
    return f"accepted: {', '.join(values)}" if values else str(error)
