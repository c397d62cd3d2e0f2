"""``kvconnect check``: options and help texts."""

from __future__ import annotations

from typing import Annotated

import typer

from kvconnect.cli.options import Insecure, JsonObject, Key, keys_at


def check(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="ROUTER | PREFILL DECODE",
            help="The URL of `kvconnect router`, or those of a prefill server and a decode server.",
        ),
    ],
    json_output: JsonObject = False,
    key: Key = None,
    insecure: Insecure = False,
) -> None:
    """Prove that KV is transferred: send a prompt through P and D, and compare with D's own answer.

    One line tells how many tokens which server prefilled, over what and at which rate their KV moved, and
    which server decoded; or why it did not work, with exit code 1. The environment's VLLM_API_KEY is sent
    along. Two prompts or more are sent: the first one pays for the servers' meeting.
    """
    from kvconnect.tools.transfer_check import run_check

    raise typer.Exit(run_check(urls, keys_at(key, insecure), json_output=json_output))
