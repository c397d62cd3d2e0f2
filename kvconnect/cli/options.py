"""Options that several commands share, and options made from a dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from kvconnect.config import ExtraConfig

JsonObject = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Key = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="A key file or a node's folder; left out, what a node here would use."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="The workers run without keys.")]


def keys_at(path: Path | None, insecure: bool = False) -> ExtraConfig:
    """A configuration with the key file or key folder at a path."""
    if path is None:
        return ExtraConfig(insecure=insecure)
    if path.is_dir():
        return ExtraConfig(keys_dir=str(path), insecure=insecure)
    return ExtraConfig(key_file=str(path), insecure=insecure)


def with_options_of(*records: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose first arguments are these dataclasses, followed by its own options.

    A field is an option if its type is annotated with a text, which is the option's help.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [*inspect.signature(function, eval_str=True).parameters.values()][len(records) :]
        options = [list(_options_of(record)) for record in records]

        @functools.wraps(function)
        def command(**given: Any) -> None:
            made = [
                record(**{option.name: given.pop(option.name) for option in its})
                for record, its in zip(records, options, strict=True)
            ]
            function(*made, **given)

        every = [*itertools.chain(*options), *(one.replace(kind=one.KEYWORD_ONLY) for one in own)]
        command.__dict__["__signature__"] = inspect.Signature(every)
        return command

    return decorate


def _options_of(record: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(record, include_extras=True)
    for field in dataclasses.fields(record):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if get_origin(hints[field.name]) is Annotated:
            kind, text = get_args(hints[field.name])
            option = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default)
            yield option.replace(annotation=Annotated[kind, typer.Option(help=text)])
