"""Adds and drains nodes while the router runs: by its admin address, and by the addresses of DNS names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Collection
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from kvconnect.addresses import join_address, split_address
from kvconnect.errors import ConfigError
from kvconnect.router.policy import Followed, Published
from kvconnect.router.pool import Pool
from kvconnect.router.router_options import NAME, clean_url, split_rank

logger = logging.getLogger("kvconnect.router")

_LOOK_UP_S = 5.0


class _Named(Published, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    url: str


@contextlib.asynccontextmanager
async def admin_served(
    address: str, pools: Collection[Pool], followed: Followed | None
) -> AsyncIterator[None]:
    """Serve ``/nodes``: GET lists, POST ``{"role", "url"}`` adds a node, DELETE drains it. Not for clients.

    Raises ``ConfigError`` if the address cannot be bound.
    """
    by_role = {pool.role: pool for pool in pools}

    async def nodes(request: web.Request) -> web.Response:
        try:
            if request.method != "GET":
                named = msgspec.json.decode(await request.read(), type=_Named)
                if named.role not in by_role:
                    raise ConfigError(f"role is {named.role!r}; accepted here: {', '.join(by_role)}")
                if named.url.startswith(NAME):
                    raise ConfigError(f"url is {named.url!r}; accepted here: a URL without {NAME}")
                pool, url = by_role[named.role], clean_url(named.url)
                if named.kv_event_source or named.kv_event_replay_source or named.kv_source:
                    if followed is None:
                        raise ConfigError("where a node publishes is given; accepted: with --policy prefix")
                    followed.published[url] = named.checked(url)
                change = pool.add if request.method == "POST" else pool.drain
                change(url)
        except (ConfigError, ValueError, msgspec.MsgspecError) as error:
            return web.json_response({"error": str(error)}, status=400)
        shown = [
            {"role": pool.role, "url": node.url, "state": node.state.value, "in_flight": node.in_flight}
            for pool in pools
            for node in pool.view()
        ]
        return web.json_response(shown)

    app = web.Application(client_max_size=1 << 16)
    app.router.add_routes([web.route(method, "/nodes", nodes) for method in ("GET", "POST", "DELETE")])
    runner = web.AppRunner(app, access_log=None)
    if (where := split_address(address)) is None:
        raise ConfigError(f"admin is {address!r}; accepted: HOST:PORT")
    await runner.setup()
    try:
        await web.TCPSite(runner, *where).start()
        yield
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    finally:
        await runner.cleanup()


async def follow_names(pool: Pool) -> None:
    """Keep a node for every address of a pool's names. If a look-up fails, the name's nodes stay."""
    known = {name: set[str]() for name in pool.names}
    failing: dict[str, str] = {}
    while known:
        for name, before in known.items():
            base, rank = split_rank(name.removeprefix(NAME))
            parts, ending = urlsplit(base), f"@{rank}" * bool(rank)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            look_up = asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
            try:
                found = await look_up
            except (OSError, UnicodeError) as error:
                # A name may be missing for minutes, until its first pod is ready.
                if failing.get(name) != str(error):
                    text = "%s cannot be looked up, and its %d nodes stay until it can: %s"
                    logger.warning(text, name, len(before), error)
                failing[name] = str(error)
                continue
            failing.pop(name, None)
            hosts = [join_address(str(address[0]), port) for *_, address in found]
            now = {f"{parts.scheme}://{host}{ending}" for host in hosts}
            for gone in sorted((before - now).intersection(pool.urls)):
                pool.drain(gone)
            for new in sorted(now - before):
                pool.add(new, name)
            known[name] = now
        await asyncio.sleep(_LOOK_UP_S)
