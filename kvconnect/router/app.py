"""The HTTP server around the flow: admission, error answers, health checks and draining.

It never logs bodies, keys or answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from aiohttp import web

from kvconnect.addresses import join_address
from kvconnect.errors import ConfigError
from kvconnect.node.http_server import (
    BadRequest,
    app_runner,
    error_response,
    errors_as_json,
    on_stop_signals,
    read_body,
    request_id_of,
)
from kvconnect.router import bodies, endpoints
from kvconnect.router.flow import Exchange, Flow
from kvconnect.router.membership import admin_served, follow_names
from kvconnect.router.policy import Followed
from kvconnect.router.pool import Pool
from kvconnect.router.room_flow import RoomFlow
from kvconnect.router.router_metrics import RouterMetrics
from kvconnect.router.router_options import RouterLimits, RouterOptions, clean_url
from kvconnect.router.upstream import Clock, Upstream, UpstreamError

logger = logging.getLogger("kvconnect.router")


_Run = Callable[[Exchange], Awaitable[web.StreamResponse]]


class Router:
    """One router: two pools, one flow, and the requests in flight. One event loop owns it."""

    def __init__(self, options: RouterOptions, limits: RouterLimits, clock: Clock) -> None:
        self.limits = limits
        self._admin = options.admin
        prefill, decode = ([clean_url(url) for url in urls] for urls in (options.prefill, options.decode))
        self.decode = Pool("decode", decode, limits)
        self.prefill = Pool("prefill", prefill, limits) if prefill else None
        self.pools = (self.decode,) if self.prefill is None else (self.prefill, self.decode)
        self.metrics = RouterMetrics(*self.pools)
        self.in_flight = 0
        self.is_draining = self.is_hurried = False
        self._clock = clock
        self._decode_fallback = options.decode_fallback
        self._upstream = Upstream(limits, self.metrics, clock, os.environ.get(bodies.API_KEY_VARIABLE, ""))
        by_prefix = options.policy == "prefix"
        self._followed = Followed(options, self.pools, self._upstream) if by_prefix else None
        placing = self._followed.placing if self._followed else None
        nodes = (self.prefill, self.decode, self._upstream, clock, options)
        self.flow = RoomFlow(*nodes) if options.bootstrap_port else Flow(*nodes, placing)

    async def lifetime(self, _app: web.Application) -> AsyncIterator[None]:
        """Hold the client session, and meanwhile check nodes, their names and their KV events."""
        async with self._upstream, contextlib.AsyncExitStack() as stack:
            if self._admin:
                await stack.enter_async_context(admin_served(self._admin, self.pools, self._followed))
            tasks = [asyncio.create_task(self._check_forever(), name="checks")]
            tasks += [asyncio.create_task(follow_names(pool), name="names") for pool in self.pools]
            if self._followed is not None:
                tasks.append(asyncio.create_task(self._followed.run(), name="KV events"))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self.flow.releases.ended()

    async def _check_forever(self) -> None:
        tried: asyncio.Task[None] | None = None
        while True:
            await asyncio.gather(
                *(self._upstream.check(pool, url) for pool in self.pools for url in pool.urls)
            )
            if self.flow.trials is not None and (tried is None or tried.done()):
                tried = asyncio.create_task(self.flow.trials.run(), name="first tokens")
            await asyncio.sleep(self.limits.check_interval_s)

    async def admitted(self, request: web.Request, run: _Run) -> web.StreamResponse:
        """Serve a request, or answer 503 if the router is full or draining."""
        started = self._clock()
        request_id = request_id_of(request.headers)
        response: web.StreamResponse
        if self.is_draining:
            response = error_response(503, "the router is shutting down", request_id)
            response.force_close()
        elif self.in_flight >= self.limits.max_in_flight:
            text = f"the router serves {self.limits.max_in_flight} requests already"
            response = error_response(503, text, request_id)
        else:
            self.in_flight += 1
            self.metrics.in_flight.inc()
            try:
                await read_body(request, self.limits.body_timeout_s)
                headers = bodies.request_headers(request.headers.items(), request_id)
                response = await run(Exchange(request, request_id, started, headers))
            except (BadRequest, UpstreamError) as error:
                response = error_response(error.status, str(error), request_id)
                if isinstance(error, UpstreamError) and error.refusal is not None:
                    response = error.refusal
            except (asyncio.CancelledError, ConnectionError):
                # The connections to nodes are closed by now, so the nodes see the client leave.
                self.metrics.clients_gone.inc()
                logger.info("%s %s: the client left", request.path, request_id)
                raise
            finally:
                self.in_flight -= 1
                self.metrics.in_flight.dec()
        resource = request.match_info.route.resource
        path = request.path if resource is None else resource.canonical
        self.metrics.requests.labels(path, str(response.status)).inc()
        took_s = self._clock() - started
        logger.info("%s %s: %d in %.3f s", request.path, request_id, response.status, took_s)
        return response

    async def health(self, _request: web.Request) -> web.Response:
        """200 while the process runs."""
        return web.json_response({"status": "alive"})

    async def ready(self, request: web.Request) -> web.Response:
        """200 if a request could be served now; with ``?all`` only if a node of each role is healthy."""
        missing = [pool.role for pool in self.pools if not pool.is_ready()]
        if self.is_draining:
            return web.json_response({"status": "draining"}, status=503)
        # Then decode nodes compute prompts; but not while it is unknown whether a prefill node is up.
        is_out = self.prefill is not None and not self.prefill.in_rotation()
        needs_no_prefill = self._decode_fallback and is_out and "all" not in request.query
        if "decode" in missing or (missing and not needs_no_prefill):
            return web.json_response({"status": "no healthy node", "roles": missing}, status=503)
        return web.json_response({"status": "ready", "missing": missing})

    async def show_metrics(self, _request: web.Request) -> web.Response:
        """The metrics in Prometheus' text format."""
        return web.Response(body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def drain(self) -> bool:
        """Refuse new requests and wait for those in flight. False if some were still running."""
        self.is_draining = True
        deadline = self._clock() + self.limits.drain_timeout_s
        while self.in_flight and self._clock() < deadline and not self.is_hurried:
            await asyncio.sleep(0.05)
        return self.in_flight == 0


ROUTER = web.AppKey("router", Router)


def create_router_app(
    options: RouterOptions, limits: RouterLimits | None = None, clock: Clock = time.monotonic
) -> web.Application:
    """The router as an aiohttp application. Serve it with ``app_runner``.

    Raises:
        ConfigError: a URL is not valid, or the policy lacks a setting.
    """
    limits = limits or RouterLimits()
    router = Router(options, limits, clock)
    app = web.Application(client_max_size=limits.max_body_bytes, middlewares=[errors_as_json])
    app[ROUTER] = router
    app.cleanup_ctx.append(router.lifetime)
    flow = router.flow
    split = endpoints.SPLIT if not isinstance(flow, RoomFlow) else endpoints.SGLANG
    served: list[tuple[str, str, _Run]] = [
        *(("POST", path, partial(flow.run, endpoint)) for path, endpoint in split.items()),
        *(("POST", path, partial(flow.pass_to_decode, is_alone=True)) for path in endpoints.ALONE),
        *((method, path, flow.pass_to_holder) for method, path in endpoints.STORED),
        *((method, path, flow.pass_to_decode) for method, path in endpoints.PASSED),
    ]
    for method, path, run in served:
        app.router.add_route(method, path, partial(router.admitted, run=run))
    app.router.add_get("/health", router.health)
    app.router.add_get("/ready", router.ready)
    app.router.add_get("/metrics", router.show_metrics)
    return app


async def serve_router(app: web.Application, host: str, port: int, stop: asyncio.Event) -> None:
    """Serve until ``stop`` is set, then drain. Port 0 takes a free port; the port is printed.

    Raises:
        ConfigError: the address cannot be bound.
    """
    router = app[ROUTER]
    runner = app_runner(app)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        taken = runner.addresses[0][1]
        print(f"kvconnect router ready on http://{join_address(host, taken)}", flush=True)
        await stop.wait()
        limit_s = router.limits.drain_timeout_s
        logger.info("draining %d requests, for %g s at most", router.in_flight, limit_s)
        if not await router.drain():
            text = "%d requests are cut off: they did not end within %g s, which is --drain-timeout-s"
            logger.warning(text, router.in_flight, limit_s)
    finally:
        await runner.cleanup()


def run_router(app: web.Application, *, host: str, port: int) -> None:
    """Run a router until SIGTERM or SIGINT; a second signal cuts off requests in flight.

    Raises:
        ConfigError: the address cannot be bound.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")

    async def main() -> None:
        stop = asyncio.Event()

        def on_signal() -> None:
            app[ROUTER].is_hurried = stop.is_set()
            stop.set()

        on_stop_signals(on_signal)
        await serve_router(app, host, port, stop)

    asyncio.run(main())
