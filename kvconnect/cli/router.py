"""``kvconnect router``: options and help texts."""

from __future__ import annotations

from typing import Annotated

import typer

_Events = Annotated[
    list[str] | None, typer.Option(help="For policy prefix, URL=tcp://HOST:PORT of a node's KV events.")
]
_Replays = Annotated[
    list[str] | None, typer.Option(help="URL=tcp://HOST:PORT that answers what was missed of them.")
]
_Sources = Annotated[
    list[str] | None,
    typer.Option(help="URL=HOST:PORT of a node's side channel, where its peers may pull what it has."),
]


def router(
    decode: Annotated[
        list[str], typer.Option(help="URL of a decode node, or a plain server; may be given several times.")
    ],
    prefill: Annotated[
        list[str] | None,
        typer.Option(help="URL of a prefill node; may be given several times. None: all are plain servers."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve HTTP on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve HTTP on; 0 takes a free one.")] = 8080,
    flow: Annotated[
        str,
        typer.Option(help="sequential asks the prefill node first, parallel asks both nodes at once."),
    ] = "sequential",
    policy: Annotated[
        str,
        typer.Option(
            help="Which node takes a request: the least loaded, or by prefix the one that has most of its "
            "prompt, in any tier, with regard to load. Of plain servers and of prefill nodes."
        ),
    ] = "least-loaded",
    kv_event_source: _Events = None,
    kv_event_replay_source: _Replays = None,
    kv_source: _Sources = None,
    decode_fallback: Annotated[
        bool,
        typer.Option(
            help="Have the decode node compute the prompt where no prefill node is left, or a prefill leg "
            "fails (no connection, 5xx, 408, 429, timeout, broken answer); otherwise that is the answer."
        ),
    ] = True,
    connect_timeout_s: Annotated[float, typer.Option(help="Seconds to reach a node.")] = 3.0,
    prefill_timeout_s: Annotated[float, typer.Option(help="Seconds for a whole prefill leg.")] = 120.0,
    decode_timeout_s: Annotated[
        float, typer.Option(help="Seconds to a decode node's first byte, and between its bytes.")
    ] = 120.0,
    retries: Annotated[int, typer.Option(help="Further nodes tried when one cannot be reached.")] = 2,
    max_in_flight: Annotated[int, typer.Option(help="Requests served at once; more get 503.")] = 1024,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.")] = 16 << 20,
    drain_timeout_s: Annotated[float, typer.Option(help="Seconds for requests to end after SIGTERM.")] = 30.0,
) -> None:
    """Route requests through pairs of prefill and decode nodes."""
    from kvconnect.errors import ConfigError
    from kvconnect.router.app import create_router_app, run_router
    from kvconnect.router.limits import RouterLimits
    from kvconnect.router.policy import POLICIES, PrefixPolicy, by_node

    if policy not in POLICIES:
        raise ConfigError(f"--policy is {policy!r}; accepted: {', '.join(POLICIES)}")
    prefix = None
    if policy == "prefix":
        prefix = PrefixPolicy(
            by_node("kv-event-source", kv_event_source or ()),
            by_node("kv-event-replay-source", kv_event_replay_source or ()),
            by_node("kv-source", kv_source or ()),
        )
    limits = RouterLimits(
        connect_timeout_s=connect_timeout_s,
        prefill_timeout_s=prefill_timeout_s,
        decode_timeout_s=decode_timeout_s,
        retries=retries,
        max_in_flight=max_in_flight,
        max_body_bytes=max_body_bytes,
        drain_timeout_s=drain_timeout_s,
    )
    app = create_router_app(
        prefill or [], decode, limits=limits, flow=flow, decode_fallback=decode_fallback, prefix=prefix
    )
    run_router(app, host=host, port=port)
