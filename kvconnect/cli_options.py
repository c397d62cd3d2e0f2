"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

JsonObject = Annotated[bool, typer.Option("--json", help="One JSON object.")]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
ExtraSettings = Annotated[
    str, typer.Option(metavar="JSON", help="Further settings of kv_connector_extra_config.")
]
Environment = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="Set in the children only; NAME alone takes it away (repeatable)."
    ),
]
