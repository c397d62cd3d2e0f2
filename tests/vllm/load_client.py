"""A client of one pair of servers under load. A job is warmed up, and then run."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from kvconnect.router import bodies
from tests.vllm.load_figures import Load, Sample, arrivals_s, prompts, streamed, tokens_so_far

_TEXT_CHARACTERS = 400
_LINE_BYTES = 2**20
LETTERS = list(range(64, 90))
"""Tokens of the models' tokenizers that are a letter each."""
_KEEP_ALIVE_S = 2.0
"""Less than vLLM keeps an idle connection: a request on one that it closes just then would fail."""

_Params = Mapping[str, Any]
_now = time.monotonic


@dataclass(frozen=True)
class Job:
    """What a pair is asked.

    ``in_flight`` clients wait for their answers; with 0, requests arrive by the rate of the load. With
    ``num_cached`` so many prompts come again and again, and are cached where they are prefilled. ``router``
    is asked in place of the pair, where there is one; its answers are of tokens that are one letter each.
    """

    prefill: str
    decode: str
    load: Load
    requests: int
    seed: int
    in_flight: int = 0
    num_cached: int = 0
    is_parallel: bool = False
    router: str = ""
    timeout_s: float = 120.0

    def prompts(self) -> list[str]:
        # A prompt that ends within a character would have no text of its first token.
        tokens = LETTERS if self.router else range(256)
        return prompts(self.load.tokens_in, self.num_cached or self.requests, self.seed, tokens)


class LegFailed(Exception):
    """A request failed: ``reason`` is one of few, ``detail`` what was answered."""

    def __init__(self, leg: str, reason: str, detail: str = "") -> None:
        super().__init__(leg, reason, detail)
        self.reason = f"{leg}: {reason}"
        self.detail = f"{self.reason} {detail}"[:_TEXT_CHARACTERS]


def warm_up(job: Job, requests: int) -> bodies.SideChannel | None:
    """Serve some requests that do not count; where the prefill server is fetched from, as it answered."""
    return asyncio.run(_warm_up(job, requests))


def run(job: Job, channel: bodies.SideChannel | None = None) -> list[Sample]:
    """Serve the job's requests."""
    return asyncio.run(_run(job, channel))


async def _warm_up(job: Job, requests: int) -> bodies.SideChannel | None:
    # Other prompts than those that count.
    others = replace(job, requests=requests, seed=-1 - job.seed, num_cached=0, is_parallel=False)
    async with _client(others, None) as client:
        await client.serve(others.prompts())
        for prompt in job.prompts() if job.num_cached else ():
            await client.cache(prompt)
    return client.channel


async def _run(job: Job, channel: bodies.SideChannel | None) -> list[Sample]:
    texts = job.prompts()
    async with _client(job, channel) as client:
        return await client.serve(texts)


@asynccontextmanager
async def _client(job: Job, channel: bodies.SideChannel | None) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=job.timeout_s)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=_LINE_BYTES
    ) as session:
        yield Client(session, job, channel)


class Client:
    """Asks as a router does. ``channel`` is where the prefill server said last that it is fetched from."""

    def __init__(
        self, session: aiohttp.ClientSession, job: Job, channel: bodies.SideChannel | None = None
    ) -> None:
        self.channel = channel
        self._session = session
        self._job = job
        self._began = 0.0

    async def serve(self, texts: list[str]) -> list[Sample]:
        """All requests of the job."""
        self._began = _now()
        if not self._job.in_flight:
            rate = self._job.load.rate_per_s or 1.0
            moments = enumerate(arrivals_s(rate, self._job.requests, self._job.seed))
            return await asyncio.gather(*(self._arrives(texts[n % len(texts)], at) for n, at in moments))
        numbers = iter(range(self._job.requests))

        async def take_turns() -> list[Sample]:
            # All clients take from one iterator.
            return [await self._one(texts[n % len(texts)], _now()) for n in numbers]

        found = await asyncio.gather(*(take_turns() for _ in range(self._job.in_flight)))
        return [sample for each in found for sample in each]

    async def cache(self, prompt: str) -> None:
        """Have the prefill server compute a prompt; whether it did shows in the run."""
        with suppress(LegFailed):
            await self._answer("P", self._job.prefill, _body(prompt, max_tokens=1))

    async def _arrives(self, prompt: str, after_s: float) -> Sample:
        arrival = self._began + after_s
        await asyncio.sleep(arrival - _now())
        return await self._one(prompt, arrival)

    async def _one(self, prompt: str, arrival: float) -> Sample:
        sent = _now()
        try:
            sample = await self._through(prompt)
        except Exception as error:
            # Whatever it is: a run does not end for one request.
            known = isinstance(error, LegFailed)
            failed = error if known else LegFailed("client", type(error).__name__, str(error))
            return Sample(_now() - self._began, sent - arrival, error=failed.reason, detail=failed.detail)
        first = sample.first_token_s - arrival
        return replace(sample, ended_s=_now() - self._began, late_s=sent - arrival, first_token_s=first)

    async def _through(self, prompt: str) -> Sample:
        """One request through its legs; ``first_token_s`` is still a moment."""
        url = self._job.decode
        if self._job.router:
            return await self._decode(self._job.router, prompt, None)
        if not self._job.is_parallel or self.channel is None:
            prefill_s, params = await self._prefill(prompt, bodies.ASK_FOR_REMOTE_DECODE)
            return replace(await self._decode(url, prompt, params), prefill_s=prefill_s)
        transfer_id = uuid.uuid4().hex
        announced = bodies.announced_decode(transfer_id, self.channel)
        decode = asyncio.create_task(self._decode(url, prompt, announced))
        try:
            prefill_s, _ = await self._prefill(prompt, bodies.announced_prefill(transfer_id))
            return replace(await decode, prefill_s=prefill_s)
        finally:
            await _end(decode)

    async def _prefill(self, prompt: str, params: _Params) -> tuple[float, _Params]:
        began = _now()
        body = _body(prompt, max_tokens=1, kv_transfer_params=params)
        answer = json.loads(await self._answer("P", self._job.prefill, body))
        handed = answer.get("kv_transfer_params")
        if not handed:
            raise LegFailed("P", "no transfer parameters")
        self.channel = bodies.side_channel(handed) or self.channel
        return _now() - began, handed

    async def _answer(self, leg: str, url: str, body: bytes) -> bytes:
        async with self._asked(leg, url, body) as answer:
            return await answer.read()

    async def _decode(self, url: str, prompt: str, params: _Params | None) -> Sample:
        wanted = self._job.load.tokens_out
        more = {} if params is None else {"kv_transfer_params": params}
        if self._job.router:
            # What asks for usage at each chunk has its first token from the decode server.
            more |= {"allowed_token_ids": LETTERS, "stream_options": {"include_usage": True}}
        else:
            more["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        body = _body(prompt, max_tokens=wanted, stream=True, **more)
        moments: list[float] = []
        num_tokens, began = 0, _now()
        async with self._asked("D", url, body) as answer:
            async for line in answer.content:
                arrived = _now()
                chunk = streamed(line)
                if "error" in chunk:
                    raise LegFailed("D", "error in the stream", str(chunk["error"]))
                letters = sum(len(choice.get("text") or "") for choice in chunk.get("choices") or ())
                if (so_far := tokens_so_far(chunk) or num_tokens + letters) > num_tokens:
                    num_tokens = so_far
                    moments.append(arrived)
        if num_tokens != wanted:
            raise LegFailed("D", "too few tokens", f"{num_tokens} of {wanted}")
        gaps = tuple(after - before for before, after in itertools.pairwise(moments))
        return Sample(0.0, decode_s=moments[0] - began, first_token_s=moments[0], gaps_s=gaps)

    @asynccontextmanager
    async def _asked(self, leg: str, url: str, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.post(
                url + "/v1/completions", data=body, headers={"Content-Type": "application/json"}
            ) as answer:
                if answer.status != 200:
                    raise LegFailed(leg, f"HTTP {answer.status}", await answer.text())
                yield answer
        except asyncio.TimeoutError:
            raise LegFailed(leg, "timeout") from None
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed(leg, type(error).__name__, str(error)) from error


def _body(prompt: str, **more: Any) -> bytes:
    rest = json.dumps({"model": "tiny", "temperature": 0, "ignore_eos": True, **more})
    return f'{{"prompt": {prompt}, {rest[1:]}'.encode()


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
