"""Reading settings from JSON, of a text or a file: an error names the key, the value and what is accepted."""

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


def read_struct(given: Any, kind: type[_Struct], where: str, hidden: Sequence[str] = ()) -> _Struct:
    """A struct read from an object, checked field by field, nested objects too.

    Raises ``ConfigError``, which calls the object ``where``. Fields in ``hidden`` are refused as unknown.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}, it must be an object of settings")
    known = [name for name in kind.__struct_fields__ if name not in hidden]
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"{where} has no key {key!r} (its value is {value!r}); {hint}accepted: {', '.join(known)}"
            )
    values = {}
    for field in msgspec.structs.fields(kind):
        name = f"{where}.{field.name}"
        if field.name in given:
            values[field.name] = _read_field(given[field.name], field.type, name, hidden)
        elif field.required:
            raise ConfigError(f"{name} is missing; {_accepted(field.type) or 'it has no default'}")
    return kind(**values)


def _read_field(value: Any, kind: Any, name: str, hidden: Sequence[str]) -> Any:
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in options if value is not None else ():
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return read_struct(value, option, name, hidden)
    if get_origin(kind) is dict and isinstance(value, Mapping):
        of = get_args(kind)[1]
        return {key: _read_field(one, of, f"{name}[{key!r}]", hidden) for key, one in value.items()}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} is {value!r}: {_accepted(kind) or error}") from error


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
