"""How one request runs: to a prefill node, then to a decode node, then the answer to the client.

The prefill node's ``kv_transfer_params`` go to the decode node unchanged. The client gets nothing before the
decode node's first byte (the commit point), so every earlier failure has its own status; a later failure
breaks the connection. With ``decode_fallback`` a failed prefill is no error: the decode node computes the
prompt instead. A client that leaves cancels the task of ``Flow.run``, which closes all connections to nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from aiohttp import web

from kvconnect.config import FIRST_TOKEN_KEY, RELEASE_KEY
from kvconnect.node.http_server import REQUEST_ID
from kvconnect.router import bodies, first_answer
from kvconnect.router.bodies import SideChannel
from kvconnect.router.decode_trials import CHAT_TOKENS, FIRST_TOKEN, DecodeTrials
from kvconnect.router.endpoints import Endpoint, has_logprobs
from kvconnect.router.first_answer import Differs, FirstAnswer, RestOfStream, has_no_output
from kvconnect.router.placing import Placing
from kvconnect.router.pool import NodeUse, Pool
from kvconnect.router.releases import Releases
from kvconnect.router.router_options import RouterOptions
from kvconnect.router.upstream import Clock, Headers, NodeAnswer, Upstream, UpstreamError, UpstreamRequest
from kvconnect.router.usage import PromptCounts, has_counts, with_counts

logger = logging.getLogger("kvconnect.router")

Result = TypeVar("Result")

_OWN_ERRORS = (500, 502)
"""Statuses of a node's own errors: it did not get the KV, or its engine ended."""
_ERROR_IN_A_STREAM = (b'data: {"error"', b"event: error")
_ABORTED = b'"finish_reason":"abort"'
"""In an answer whose server stops without draining, or is paused; vLLM's stream of such a request may as well
end without a token. Text has its quotes escaped."""

_REPORTED = {"kv_hint_results", "kvconnect_receipt"}
_CUT_OFF = "the answer to request %s was cut off: %s"
_COUNT_WAIT_S = 1.0
"""How long an answer's counts wait for P's: for P's answer to a prompt whose KV D has got."""


_PASSED = Endpoint()
"""For bodies of which the router reads nothing."""


@dataclass(eq=False, slots=True)
class Exchange:
    """One client's request, which arrived at ``started``, with the ``headers`` that nodes get.

    ``endpoint`` and ``body`` are set where the router reads the body. ``takes_first``: the first token may be
    P's. ``asked`` is the prefill node that may hold the prompt under ``release_name``; empty once it refused.
    ``is_taken``: a decode node has answered that was given P's parameters, and fetched or will release by
    itself. ``broken`` are nodes that broke off, or had an error, before the client had got anything.
    ``may_repeat``: the request generates, and was not run again. ``prefill`` is P's answer to the request
    where D's answer is to have P's counts, and ``response`` the client's answer once that has begun.
    """

    request: web.Request
    request_id: str
    started: float
    headers: Headers
    endpoint: Endpoint = _PASSED
    body: Mapping[str, Any] = field(default_factory=dict)
    takes_first: bool = False
    release_name: str = field(default_factory=lambda: uuid.uuid4().hex)
    asked: list[str] = field(default_factory=list)
    is_taken: bool = False
    broken: list[str] = field(default_factory=list)
    may_repeat: bool = False
    prefill: asyncio.Future[Prefilled] | None = None
    response: web.StreamResponse | None = None

    @property
    def is_stream(self) -> bool:
        """Whether the client wants a streamed answer."""
        return self.body.get("stream") is True

    def again(self) -> Exchange:
        """The same request, to be run once more: nothing is left of what nodes hold of it."""
        return replace(self, release_name=uuid.uuid4().hex, asked=[], is_taken=False, prefill=None)

    async def passed_body(self) -> Mapping[str, Any] | bytes | None:
        """The body to pass on: a form as it is, another one without what a client must not name.

        Raises:
            BadRequest: it is neither a form nor a JSON object.
        """
        raw, request = await self.request.read(), self.request
        if not request.content_type.startswith("multipart/"):
            return _PASSED.parse(raw) if raw else None
        form = request.headers["Content-Type"]
        self.headers = bodies.request_headers(request.headers.items(), self.request_id, form)
        return raw or None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The ``answer`` of the prefill node at ``url``, and the parameters that it ``handed`` out."""

    url: str
    answer: Mapping[str, Any]
    handed: Mapping[str, Any]


Asked = contextlib.AbstractAsyncContextManager[NodeAnswer]
"""A node that is asked, up to the beginning of its answer."""


class Flow:
    """Runs requests against two pools, or against plain servers, which are all in ``decode``.

    Keeps no state of a request between calls. With ``placing``, requests go to nodes with their prefix.
    """

    def __init__(
        self,
        prefill: Pool | None,
        decode: Pool,
        upstream: Upstream,
        clock: Clock,
        options: RouterOptions,
        placing: Placing | None = None,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._upstream = upstream
        self._metrics = upstream.metrics
        self._clock = clock
        self._parallel = options.flow == "parallel"
        self._decode_fallback = options.decode_fallback
        self.placing = placing
        is_first = options.first_token == "prefill" and prefill is not None
        self.trials = DecodeTrials(decode, upstream) if is_first else None
        # Whether each prefill node computes prompts to their last token.
        self._computes_whole: dict[str, bool] = {}
        self.releases = Releases(upstream)
        # Each prefill node's side channel, as named in its last answer.
        self._channels: dict[str, SideChannel] = {}
        self._logged: set[tuple[str, ...]] = set()

    async def run(self, endpoint: Endpoint, exchange: Exchange) -> web.StreamResponse:
        """Serve a request that generates.

        Raises:
            BadRequest: the body is not a JSON object.
            UpstreamError: a node gave no answer, and the client has got nothing yet.
        """
        body = endpoint.parse(await exchange.request.read())
        exchange.endpoint, exchange.body = endpoint, body
        if self.trials is not None and first_answer.is_eligible(exchange.request.path, body):
            exchange.takes_first = True
            exchange.headers = bodies.identity_encoding(exchange.headers)
            if self._parallel and body.get("temperature") != 0:
                # With one seed both nodes sample the same first token.
                body.setdefault("seed", uuid.uuid4().int >> 65)
        if body.get("previous_response_id") is not None:
            if self._prefill is not None and (reason := endpoint.direct_reason(body)):
                self._count_fallback(*reason)
            return await self.pass_to_holder(exchange, body)
        exchange.may_repeat = True
        try:
            return await self._run(exchange)
        except UpstreamError as error:
            if not self._may_repeat(exchange, error):
                raise
            self._repeated(exchange, error)
            return await self._run(exchange.again())

    def _may_repeat(self, exchange: Exchange, error: UpstreamError) -> bool:
        """Whether a request is repeated, since a node broke off of whose answer the client has got nothing.

        Once, and by other nodes: a request of which nodes die must not go through all of them.
        """
        pools = (self._decode,) if self._prefill is None else (self._prefill, self._decode)
        others = [[node for node in pool.in_rotation() if node.url not in exchange.broken] for pool in pools]
        return exchange.may_repeat and error.reason == "broken" and all(others)

    def _leave_to_others(self, exchange: Exchange, begun: NodeAnswer) -> None:
        """Raise ``UpstreamError`` if a request that ended with an error of this node's is to be repeated."""
        exchange.broken.append(begun.lease.url)
        error = UpstreamError(502, "broken", f"the {begun.pool.role} node answered with an error")
        if self._may_repeat(exchange, error):
            self._metrics.node_request_failures.labels(begun.pool.role, "error").inc()
            raise error

    def _repeated(self, exchange: Exchange, error: UpstreamError) -> None:
        exchange.may_repeat = False
        self._metrics.repeats.inc()
        self._log_first("request %s is run again by other nodes: %s", exchange.request_id, str(error))

    async def _run(self, exchange: Exchange) -> web.StreamResponse:
        endpoint, body = exchange.endpoint, exchange.body
        if self._prefill is None:
            return await self._run_whole(exchange, self._decode)
        if (reason := endpoint.direct_reason(body)) is not None:
            return await self._run_alone(exchange, *reason)
        if endpoint.is_notice(body):
            # The prefill node brings what is kept of the announced prompt.
            return await self._run_whole(exchange, self._prefill)
        if exchange.takes_first and first_answer.is_one_token(endpoint, body):
            return await self._run_one_token(exchange, self._prefill)
        return await self._run_both(exchange, self._prefill)

    async def pass_to_decode(self, exchange: Exchange, *, is_alone: bool = False) -> web.StreamResponse:
        """Serve a request that is not split from a decode node.

        ``is_alone``: it generates, and two nodes would share it if the answer named what P holds.

        Raises:
            BadRequest: the body is not a JSON object.
            UpstreamError: no node answered.
        """
        body = await exchange.passed_body()
        if is_alone and self._prefill is not None:
            why = f"of {exchange.request.path} answers name nothing that a prefill node holds"
            self._count_fallback("endpoint", why)
        return await self._relay(exchange, self._begun(exchange, body))

    async def pass_to_holder(
        self, exchange: Exchange, body: Mapping[str, Any] | None = None
    ) -> web.StreamResponse:
        """Serve a request about a stored response from the decode node that stores it.

        The decode nodes are asked one after the other, until one does not answer 404. ``body``: None for the
        client's own.

        Raises:
            BadRequest: there is a body, and it is neither a form nor a JSON object.
            UpstreamError: no node answered.
        """
        sent = body or await exchange.passed_body()
        asked: list[str] = []
        while True:
            lease = self._decode.take(avoid=asked)
            asked += [lease.url] if lease is not None else []
            is_last = all(node.url in asked for node in self._decode.in_rotation())
            try:
                async with self._begun(exchange, sent, lease, retry=is_last) as begun:
                    if begun.head.status != 404 or is_last:
                        return await self._pass_on(exchange, begun)
            except UpstreamError as error:
                if error.was_reached or is_last:
                    raise

    async def _run_whole(self, exchange: Exchange, pool: Pool) -> web.StreamResponse:
        """Serve a request from one node of ``pool``."""
        lease, placed = await self._take(exchange, pool)
        sent = exchange.endpoint.decode_body(exchange.body, placed or None)
        return await self._relay(exchange, self._begun(exchange, sent, lease, pool))

    async def _run_one_token(self, exchange: Exchange, prefill: Pool) -> web.StreamResponse:
        """Serve a request for one token: P's answer is complete, and nothing is held for a decode node."""
        lease, placed = await self._take(exchange, prefill)
        sent = exchange.endpoint.decode_body(exchange.body, placed or None)
        try:
            async with self._begun(exchange, sent, lease, prefill) as begun:
                status = begun.head.status
                if self._decode_fallback and status != 200 and not _is_of_the_request(status):
                    raise UpstreamError(status, "refused", f"the prefill node answered {status}")
                self._metrics.first_tokens.labels("only").inc()
                return await self._pass_on(exchange, begun)
        except UpstreamError as error:
            return await self._without_prefill(exchange, error)

    async def _take(self, exchange: Exchange, pool: Pool) -> tuple[NodeUse | None, Mapping[str, Any]]:
        """The first node to ask, and parameters that name to it a peer with more of the prompt."""
        if self.placing is None:
            return pool.take(avoid=exchange.broken), {}
        placement = await self.placing.place(pool, exchange.headers, exchange.body)
        lease = pool.take(exchange.broken, placement.work, placement.last)
        if lease is None:
            return None, {}
        self.placing.keep(placement.session, lease.url)
        return lease, placement.params(lease.url, exchange.broken)

    async def _run_both(self, exchange: Exchange, prefill: Pool) -> web.StreamResponse:
        """Serve a request split between two nodes. P holds nothing longer than until this ends."""
        lease, placed = await self._take(exchange, prefill)
        channel = self._channels.get(lease.url) if lease is not None and self._parallel else None
        try:
            if lease and channel and (channel.handle or not exchange.endpoint.is_several(exchange.body)):
                return await self._run_at_once(exchange, lease, channel, placed)
            return await self._run_in_turn(exchange, lease, placed)
        finally:
            # Another connector has no such release, and may take it for a request to fetch.
            known = self._channels.get(exchange.asked[-1]) if exchange.asked else None
            if known is not None and known.handle and not exchange.is_taken:
                self.releases.release(exchange.asked[-1], exchange.release_name, exchange.headers)

    async def _run_in_turn(
        self, exchange: Exchange, lease: NodeUse | None = None, placed: Mapping[str, Any] | None = None
    ) -> web.StreamResponse:
        """Prefill, first at the node of ``lease``, then decode."""
        self._metrics.flows.labels("sequential").inc()
        params = bodies.ASK_FOR_REMOTE_DECODE
        if exchange.endpoint.is_batch(exchange.body):
            # The answer names the first prompt only; a transfer id finds each. Never the client's own, which
            # would let the client choose whose KV a decode node loads.
            params = bodies.announced_prefill(uuid.uuid4().hex)
        return await self._go_on(exchange, self._run_prefill(exchange, {**params, **(placed or {})}, lease))

    async def _run_at_once(
        self, exchange: Exchange, lease: NodeUse, channel: SideChannel, placed: Mapping[str, Any]
    ) -> web.StreamResponse:
        """Serve a request from both nodes: the decode node waits for KV while the prefill node computes it.

        P's answer decides. If it contradicts the parameters sent to D, D's request is cancelled before the
        client has got any of its answer, and the request continues in the sequential flow.
        """
        self._metrics.flows.labels("parallel").inc()
        transfer_id = uuid.uuid4().hex
        announced = {**bodies.announced_prefill(transfer_id), **placed}
        # The task owns the lease before this one can be cancelled: see ``asking``.
        prefill = asyncio.create_task(self._run_prefill(exchange, announced, lease, retry=False))
        exchange.prefill = prefill
        try:
            sent = exchange.endpoint.decode_body(exchange.body, bodies.announced_decode(transfer_id, channel))
            async with asking(self._begun(exchange, sent)) as decode:
                await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
                held = None if decode.done() else _as_announced(prefill, channel)
                if held is not None and (first := self._first_of(exchange, held)) is not None:
                    return await self._run_behind(exchange, first, {}, decode=decode)
                answered = _result_of(decode)
                # Why D has no KV only P knows.
                if lacks_kv := answered is not None and answered.is_error:
                    await asyncio.wait({prefill})
                if (decode.done() and not lacks_kv) or _as_announced(prefill, channel) is not None:
                    return await self._pass_on(exchange, await decode)
            # Only P's answer is left; D's connection is closed.
            self._metrics.flows.labels("resumed").inc()
            error = prefill.exception()
            if isinstance(error, UpstreamError) and error.reason != "refused":
                self._channels.pop(lease.url, None)
                if not error.was_reached:
                    # The node does not have the request: another node may take it.
                    return await self._run_in_turn(exchange)
            return await self._go_on(exchange, prefill)
        finally:
            # P's request may last longer than D's first byte, and is void after D's last.
            await _end(prefill)

    async def _go_on(self, exchange: Exchange, prefill: Awaitable[Prefilled]) -> web.StreamResponse:
        """Continue after prefill: decode, or the reason why not.

        Raises:
            UpstreamError: a node gave no answer, and the client has got nothing yet.
        """
        try:
            outcome = await prefill
        except UpstreamError as error:
            return await self._without_prefill(exchange, error)
        first = self._first_of(exchange, outcome)
        if first is not None and first.is_whole:
            return await self._begin_stream(exchange, first)
        if not outcome.handed:
            why = (
                f"prefill node {outcome.url} handed out no kv_transfer_params; where that is so for every "
                "prompt, its kv_role has to be kv_producer or kv_both"
            )
            return await self._run_alone(exchange, "empty_params", why)
        endpoint, body = exchange.endpoint, exchange.body
        is_batch = endpoint.is_batch(body)
        params = bodies.decode_params(outcome.handed, is_batch=is_batch, is_several=endpoint.is_several(body))
        if params is None:
            why = "several prompts or answers cannot share what the prefill node handed out"
            return await self._run_alone(exchange, "several", why)
        tokens = endpoint.tokens_of(outcome.answer) if self._reuses_tokens(exchange) else None
        exchange.prefill = asyncio.get_running_loop().create_future()
        exchange.prefill.set_result(outcome)
        if first is not None:
            return await self._run_behind(exchange, first, params, tokens)
        return await self._relay(exchange, self._begun(exchange, endpoint.decode_body(body, params, tokens)))

    async def _without_prefill(self, exchange: Exchange, error: UpstreamError) -> web.StreamResponse:
        """Raises ``error`` where no decode node may compute the prompt instead, or another P can."""
        is_for_client = error.reason == "refused" and _is_of_the_request(error.status)
        if is_for_client or not self._decode_fallback or self._may_repeat(exchange, error):
            raise error
        return await self._run_alone(exchange, f"prefill_{error.reason}", str(error))

    async def _run_alone(self, exchange: Exchange, reason: str, why: str) -> web.StreamResponse:
        """Let the decode node compute the prompt too."""
        self._count_fallback(reason, why)
        exchange.prefill = None
        return await self._relay(exchange, self._begun(exchange, exchange.body))

    def _count_fallback(self, reason: str, why: str) -> None:
        """Count a request that a decode node serves alone. Each ``reason`` is logged once."""
        self._metrics.fallbacks.labels(reason).inc()
        if self._is_first("fallback", reason):
            logger.warning(
                "a request is computed by its decode node alone (%s): %s (further ones are only counted, in "
                "kvconnect_router_fallbacks_total)",
                reason,
                why,
            )

    def _log_first(self, text: str, request_id: str, why: str) -> None:
        """Log what became of a request; of each reason the first as an error."""
        level = logging.ERROR if self._is_first(text, why) else logging.INFO
        logger.log(level, f"{text} (further ones are logged at level INFO)", request_id, why)

    def _is_first(self, *logged: str) -> bool:
        is_first = logged not in self._logged
        self._logged.add(logged)
        return is_first

    async def _run_prefill(
        self,
        exchange: Exchange,
        params: Mapping[str, Any],
        lease: NodeUse | None = None,
        *,
        retry: bool = True,
    ) -> Prefilled:
        """Prefill with these parameters, and record the node's side channel.

        ``lease`` and ``retry`` are those of ``Upstream.send``.
        """
        assert self._prefill is not None, "plain servers are asked for no prefill"
        headers = bodies.identity_encoding(exchange.headers)
        body = exchange.endpoint.prefill_body(exchange.body, {**params, RELEASE_KEY: exchange.release_name})
        if self._reuses_tokens(exchange) or (exchange.takes_first and exchange.is_stream):
            body["return_token_ids"] = True
        if exchange.takes_first and exchange.is_stream:
            least = exchange.body.get("min_tokens")
            if isinstance(least, int) and least > 0:
                body["min_tokens"] = 1
        path = exchange.request.path_qs
        request = UpstreamRequest("POST", path, headers, body, exchange.asked, exchange.broken)
        async with self._upstream.send(self._prefill, request, lease, retry=retry) as answer:
            raw, status = await self._upstream.read_whole(answer), answer.head.status
            if status != 200:
                exchange.asked.clear()
                refused = bodies.answer_headers(answer.head.headers.items(), exchange.request_id)
                refusal = web.Response(status=status, body=raw, headers=refused)
                raise UpstreamError(status, "refused", f"the prefill node answered {status}", refusal)
        try:
            parsed = json.loads(raw)
        except (ValueError, RecursionError):
            text = "the prefill node's answer is not JSON"
            raise self._upstream.failed("prefill", "bad_answer", text) from None
        parsed = parsed if isinstance(parsed, dict) else {}
        handed = parsed.get(bodies.PARAMS) or {}
        if not isinstance(handed, dict):
            text = f"the prefill node's {bodies.PARAMS} are not an object"
            raise self._upstream.failed("prefill", "bad_answer", text)
        # Results of hints, and P's receipt, are no KV: the decode node returns them with its own.
        if not handed.keys() - _REPORTED:
            handed = {}
        url, channel = answer.lease.url, bodies.side_channel(handed)
        if channel is None:
            self._channels.pop(url, None)
        else:
            self._channels[url] = channel
            if self.placing is not None:
                self.placing.learn(url, channel)
        return Prefilled(url, parsed, handed)

    async def _relay(self, exchange: Exchange, asked: Asked) -> web.StreamResponse:
        """Pass the answer of one node on."""
        async with asked as begun:
            return await self._pass_on(exchange, begun)

    @contextlib.asynccontextmanager
    async def _begun(
        self,
        exchange: Exchange,
        body: Mapping[str, Any] | bytes | None,
        lease: NodeUse | None = None,
        pool: Pool | None = None,
        *,
        retry: bool = True,
    ) -> AsyncIterator[NodeAnswer]:
        """Ask a node and read its answer's first bytes. Leaving the block closes the connection.

        ``lease`` and ``retry`` are those of ``Upstream.send``; ``pool`` defaults to the decode nodes.

        Raises:
            UpstreamError: there is no answer.
        """
        client = exchange.request
        request = UpstreamRequest(
            client.method, client.path_qs, exchange.headers, body, broken=exchange.broken
        )
        pool = pool or self._decode
        async with self._upstream.send(pool, request, lease, retry=retry) as begun:
            is_well = begun.head.status == 200
            first = await begun.read()
            is_empty = is_well and _is_event_stream(begun) and has_no_output(first)
            while is_empty and (read := await begun.read()):
                first += read
                is_empty = has_no_output(first)
            if not first and is_well:
                raise self._upstream.failed(pool.role, "empty", f"the {pool.role} node's answer is empty")
            pool.computed(begun.lease)
            params = body.get(bodies.PARAMS) if isinstance(body, Mapping) else None
            if is_well and params and params.get("do_remote_prefill"):
                exchange.is_taken = True
            begun.first = first
            begun.is_error = begun.head.status in _OWN_ERRORS or first.startswith(_ERROR_IN_A_STREAM)
            begun.is_error |= is_empty or _ABORTED in first
            yield begun

    def _reuses_tokens(self, exchange: Exchange) -> bool:
        """Whether D gets the tokens of a text that P tokenised."""
        if not exchange.endpoint.is_text(exchange.body):
            return False
        is_chat = exchange.endpoint.text == "messages"
        return not is_chat or (self.trials is not None and self.trials.all_take(CHAT_TOKENS))

    def _first_of(self, exchange: Exchange, prefilled: Prefilled) -> FirstAnswer | None:
        """The part of P's answer that the client gets before D's answer, or None."""
        if not exchange.takes_first or not exchange.is_stream or self.trials is None:
            return None
        if prefilled.handed:
            # Of a hybrid's prompt D computes the last token: then P's token is not part of the answer.
            is_whole = first_answer.is_of_whole_prompt(prefilled.answer, prefilled.handed)
            self._computes_whole[prefilled.url] = is_whole
        first = None
        if self._computes_whole.get(prefilled.url):
            first = first_answer.read_first(prefilled.answer, exchange.body)
        outcome = "withheld" if first is None else "only" if first.is_whole else "prefill"
        if outcome == "prefill" and not self.trials.all_take(FIRST_TOKEN):
            first, outcome = None, "not_tried"
        self._metrics.first_tokens.labels(outcome).inc()
        return first

    async def _begin_stream(self, exchange: Exchange, first: FirstAnswer) -> web.StreamResponse:
        """Send the client P's token, and the end of the stream if that is all."""
        response = web.StreamResponse(headers={REQUEST_ID: exchange.request_id})
        response.content_type, response.charset = "text/event-stream", "utf-8"
        await self._prepare(exchange, response)
        await response.write(first.sent)
        if first.is_whole:
            await response.write_eof()
        return response

    async def _prepare(self, exchange: Exchange, response: web.StreamResponse) -> None:
        exchange.response = response
        await response.prepare(exchange.request)
        self._metrics.first_byte_seconds.observe(self._clock() - exchange.started)

    async def _run_behind(
        self,
        exchange: Exchange,
        first: FirstAnswer,
        params: Mapping[str, Any],
        tokens: list[int] | None = None,
        decode: asyncio.Task[NodeAnswer] | None = None,
    ) -> web.StreamResponse:
        """Send the client P's token at once, unless it has it, then D's answer, where D is given this token.

        ``tokens`` are those of the prompt, if D is to be spared tokenising it. ``decode``: D was asked before
        P's token was known. Both nodes sample the same one, except for near ties: then D, which has the KV,
        is asked again with the token. If D gives no answer, another one computes the prompt, or the stream
        ends with an error, as a server's own does.
        """
        is_given, sent = decode is None, {**params, FIRST_TOKEN_KEY: first.token}
        async with contextlib.AsyncExitStack() as stack:
            if decode is None:
                body = exchange.endpoint.decode_body(exchange.body, sent, tokens)
                decode = await stack.enter_async_context(asking(self._begun(exchange, body)))
            if exchange.response is None:
                await self._begin_stream(exchange, first)
            try:
                return await self._go_behind(exchange, first, decode)
            except Differs as error:
                self._metrics.first_tokens.labels("differs" if is_given else "repeated").inc()
                if is_given:
                    return await self._end_with(exchange, f"the decode node's answer differs: {error}")
            except UpstreamError as error:
                if not self._decode_fallback or not self._may_repeat(exchange, error):
                    return await self._end_with(exchange, str(error))
                self._repeated(exchange, error)
        return await self._run_behind(exchange, first, {})

    async def _go_behind(
        self, exchange: Exchange, first: FirstAnswer, decode: asyncio.Task[NodeAnswer]
    ) -> web.StreamResponse:
        """Continue the client's stream with D's answer behind P's token.

        Raises:
            UpstreamError: D's answer ended before anything of it was sent.
            Differs: D's answer begins with another token; none of it was sent.
        """
        rest = RestOfStream(first, has_logprobs=has_logprobs(exchange.body))
        begun = await decode
        if begun.is_error:
            self._leave_to_others(exchange, begun)
        if begun.head.status != 200:
            text = f"the decode node answered {begun.head.status}"
            raise self._upstream.failed("decode", "refused", text)
        kept, read = rest.take(begun.first), begun.first
        while read and not rest.is_over:
            read = await begun.read()
            kept += rest.take(read)
        if kept.startswith(_ERROR_IN_A_STREAM):
            self._leave_to_others(exchange, begun)
        return await self._go_on_passing(exchange, begun, kept, rest.take)

    async def _end_with(self, exchange: Exchange, why: str) -> web.StreamResponse:
        """End a stream that has only its first token with an error, as a server does."""
        self._log_first(_CUT_OFF, exchange.request_id, f"it has no more than its first token: {why}")
        response = exchange.response
        assert response is not None, "the first token was sent"
        await response.write(first_answer.error_end(why))
        await response.write_eof()
        return response

    async def _pass_on(self, exchange: Exchange, begun: NodeAnswer) -> web.StreamResponse:
        """Stream the node's answer to the client. From here on a failing node breaks the answer off.

        Raises:
            ConnectionError: the client left.
            UpstreamError: the answer is an error of the node's, and another node may do better.
        """
        if begun.is_error:
            self._leave_to_others(exchange, begun)
        head = begun.head
        headers = bodies.answer_headers(head.headers.items(), exchange.request_id)
        response = web.StreamResponse(status=head.status, reason=head.reason, headers=headers)
        if exchange.prefill is not None:
            # Counts of the prompt may be replaced.
            response.headers.popall("Content-Length", None)
        await self._prepare(exchange, response)
        return await self._go_on_passing(exchange, begun, begun.first, bytes)

    async def _go_on_passing(
        self, exchange: Exchange, begun: NodeAnswer, chunk: bytes, kept_of: Callable[[bytes], bytes]
    ) -> web.StreamResponse:
        """Send the client a chunk, and ``kept_of`` each chunk that follows, with P's counts of the prompt."""
        response, prefill, is_open = exchange.response, exchange.prefill, True
        assert response is not None, "the answer has begun"
        whole = bodies.WholeEvents(is_stream=_is_event_stream(begun))
        wait_s = _COUNT_WAIT_S
        while True:
            if prefill is not None:
                chunk = whole.take(chunk, is_end=not is_open)
                if has_counts(chunk):
                    await asyncio.wait({prefill}, timeout=wait_s)
                    wait_s = 0.0
                    if (outcome := _result_of(prefill)) is not None:
                        chunk = with_counts(chunk, PromptCounts.of(outcome.answer, outcome.handed))
            if chunk:
                await response.write(chunk)
            if not is_open:
                break
            try:
                read = await begun.read()
                is_open, chunk = bool(read), kept_of(read)
            except Exception as error:
                self._log_first(_CUT_OFF, exchange.request_id, str(error) or type(error).__name__)
                if exchange.request.transport is not None:
                    # An orderly end would make the answer look complete to the client.
                    exchange.request.transport.abort()
                return response
        await response.write_eof()
        return response


@contextlib.asynccontextmanager
async def asking(asked: Asked) -> AsyncIterator[asyncio.Task[NodeAnswer]]:
    """Ask a node in a task, which is ended with the block.

    The task starts, and owns the lease, before the caller's can be cancelled: a cancellation takes effect at
    that task's next turn, and new tasks take their first turn in the order of their creation.
    """
    async with contextlib.AsyncExitStack() as stack:
        task = asyncio.create_task(stack.enter_async_context(asked))
        try:
            yield task
        finally:
            await _end(task)


def _is_event_stream(begun: NodeAnswer) -> bool:
    return begun.head.content_type == "text/event-stream"


def _is_of_the_request(status: int) -> bool:
    """Whether every node would answer so; other failures mean that this node cannot serve it now."""
    return 400 <= status < 500 and status not in (408, 429)


def _result_of(asked: asyncio.Future[Result]) -> Result | None:
    """A node's answer, once it is there; None for a failure too."""
    is_there = asked.done() and not asked.cancelled() and asked.exception() is None
    return asked.result() if is_there else None


def _as_announced(prefill: asyncio.Task[Prefilled], channel: SideChannel) -> Prefilled | None:
    """P's answer if P holds the KV at the side channel where D fetches it; else None."""
    outcome = _result_of(prefill)
    return outcome if outcome is not None and bodies.side_channel(outcome.handed) == channel else None


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for it. Its exception is dropped."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
