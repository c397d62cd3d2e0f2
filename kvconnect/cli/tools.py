"""``kvconnect up``, ``check``, ``doctor`` and ``inspect``: options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvconnect.cli.options import Insecure, JsonObject, Key, keys_at


def up(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model's folder, or its name on the hub.")],
    port: Annotated[
        int,
        typer.Option(min=1, max=65335, help="The router's port; P has the one 100 above, D that 200 above."),
    ] = 8000,
) -> None:
    """Run a model here as prefill server, decode server and router of vLLM, and show where its KV came from.

    On two GPUs, on one that both servers share, or on a CPU with vLLM's CPU build. The commands are printed,
    to be copied. Further options are passed to both vLLM servers, after `--`: `kvconnect up MODEL --
    --max-model-len 8192`. Ctrl-C ends all three processes.
    """
    from kvconnect.tools.up_runner import run_up

    raise typer.Exit(run_up(model, port, context.args))


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


def doctor(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PREFILL.json]",
            help="Compare two caches, in place of this machine: the prefill node's, by its model's folder or "
            "config.json, or a file as in deploy/examples.",
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Argument(metavar="[DECODE.json]", help="The decode node's cache; left out, the same."),
    ] = None,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(metavar="JSON|FILE", help="The node's configuration, as it is started with."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="A node that serves: http://HOST:PORT of its server, or HOST:PORT of its side channel "
            "(repeatable)."
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Measure the link to each peer too, for a second or two.")
    ] = False,
    tp: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tensor-parallel size of a cache; a second one is the decode node's."),
    ] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a block (16 of a model); a second one is the decode node's."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Tokens of the request that caches are compared by.")
    ] = 8192,
    json_output: JsonObject = False,
) -> None:
    """Report what will work here, what will not, and what to do about it; exit 1 on a failure.

    Of this machine, its configuration and peers that serve; or, with files of two caches, what their nodes
    would exchange for a request, rank by rank, and every reason for which they would not. Neither need run.
    """
    from kvconnect.tools import doctor_runner

    if source is None:
        found = doctor_runner.examine(kv_transfer_config, peers=peer or (), tokens=tokens, measured=measure)
    else:
        given = {"tp_size": tp or [], "block_size": block_size or []}
        sizes = [{key: values[at] for key, values in given.items() if values} for at in (0, -1)]
        sides = (source, sizes[0]), (target or source, sizes[1])
        found = list(doctor_runner.compare(*sides, tokens, kv_transfer_config))
    raise typer.Exit(doctor_runner.show(found, json_output=json_output))


def inspect(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS...",
            help="http://HOST:PORT of a server, for all of its workers, or HOST:PORT of a side channel.",
        ),
    ],
    request: Annotated[
        str,
        typer.Option("--request", metavar="ID", help="Only what belongs to a request, by a part of its id."),
    ] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Anew each second, until Ctrl-C.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what happened lately to requests, P's and D's, as a trace."),
    ] = None,
    last: Annotated[
        int, typer.Option(min=1, help="So many requests of the trace, those that ended last.")
    ] = 100,
    json_output: JsonObject = False,
    key: Key = None,
    insecure: Insecure = False,
) -> None:
    """Show what running workers, a node's or vLLM's, hold and do right now, and what came of their loads.

    Their role and versions, leases, loads, slots, peers and breakers, tiers, and their last records. Of
    leases and loads the oldest; --json has all, one object a worker. Handles are shown as digests.

    --trace asks P and D, all ranks of them, for their timelines instead. The file is in Chrome's trace
    format, and the slowest loads are printed: how long each took, in milliseconds, and where: to meet P and
    ask it, until P could begin, until all was packed, written, notified, unpacked and reported; and for how
    long of that a transfer thread did not get the interpreter. Exit 1 if there is no request.
    """
    from kvconnect.tools.inspect_runner import run_inspect, run_trace

    extra = keys_at(key, insecure)
    if trace is not None:
        raise typer.Exit(run_trace(addresses, extra, last=last, out=trace))
    raise typer.Exit(run_inspect(addresses, extra, request=request, watch=watch, json_output=json_output))
