"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvconnect.config import ExtraConfig

JsonObject = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Key = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="A key file or a node's folder; left out, what a node here would use."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="The workers run without keys.")]


def keys_at(path: Path | None, insecure: bool = False) -> ExtraConfig:
    """A configuration with the key file or the folder of keys at a path."""
    from kvconnect.config import ExtraConfig

    if path is None:
        return ExtraConfig(insecure=insecure)
    if path.is_dir():
        return ExtraConfig(keys_dir=str(path), insecure=insecure)
    return ExtraConfig(key_file=str(path), insecure=insecure)
