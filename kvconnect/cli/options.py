"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

JsonObject = Annotated[bool, typer.Option("--json", help="One JSON object.")]
