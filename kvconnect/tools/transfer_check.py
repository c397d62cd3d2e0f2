"""``kvconnect check``: sends prompts of its own through P and D, and shows that D computed with P's KV."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError, KVConnectError, PeerError
from kvconnect.node.children import Samples, growth
from kvconnect.outcome import Outcome
from kvconnect.peer.keyring import load_keyring
from kvconnect.router.bodies import ASK_FOR_REMOTE_DECODE, PARAMS
from kvconnect.tools.inspect_runner import look
from kvconnect.tools.server_client import complete, random_text, read_samples, served_model, side_channels
from kvconnect.tools.showing import printable, size

_CHARACTERS = 1000
_SHORTEST = 64
_TOKENS_OUT = 8
# The first prompt pays for the two nodes' meeting. With P's KV, D computes the last token of a prompt in a
# step of one token, by itself in a longer one: where two tokens are nearly as likely, rounding decides.
_LEAST_TRIES, _MOST_TRIES = 2, 4
_FALLBACKS = "kvconnect_router_fallbacks_total"
_HEALTHY = "kvconnect_router_node_healthy"


@dataclass(frozen=True)
class Checked:
    """What one prompt showed, or several. ``problem`` is empty if D decodes with P's KV as it does by itself.

    ``seconds`` is of the whole load: from D's order to its end; bytes are those of all ranks. The first
    ``equal_tokens`` of ``answered_tokens`` are D's own.
    """

    problem: str = ""
    prefill: str = ""
    decode: str = ""
    prompt_tokens: int = 0
    loaded_tokens: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
    lane: str = ""
    answered_tokens: int = 0
    equal_tokens: int = 0

    def __str__(self) -> str:
        if self.problem:
            return f"FAILED: {self.problem}"
        rate = self.total_bytes / self.seconds / 1e9 if self.seconds else 0.0
        is_whole = self.equal_tokens == self.answered_tokens
        equal = "as" if is_whole else f"the first {self.equal_tokens} as"
        return (
            f"ok: {self.prefill} prefilled {self.loaded_tokens} of {self.prompt_tokens} tokens, their KV "
            f"({size(self.total_bytes)}) moved to {self.decode} in {self.seconds * 1e3:.3g} ms ({rate:.3g} "
            f"GB/s, {self.lane}), which decoded {self.answered_tokens} tokens, {equal} it does by itself"
        )


@dataclass(frozen=True)
class Route:
    """The servers to ask: through ``router``, or without one first P, then D."""

    router: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]

    def ask(self, model: str, prompt: str, request_id: str) -> Mapping[str, Any]:
        """The answer of P and D to a prompt. Raises ``PeerError``: one of them gives none."""
        more: dict[str, Any] = {"max_tokens": _TOKENS_OUT, "return_token_ids": True}
        if self.router:
            return complete(self.router, model, prompt, request_id, **more)
        asked = {"max_tokens": 1, PARAMS: ASK_FOR_REMOTE_DECODE}
        first = complete(self.prefill[0], model, prompt, request_id, **asked)
        if not (params := first.get(PARAMS)):
            raise PeerError(
                f"{self.prefill[0]} holds no KV for a decode server: start it with a kv_transfer_config "
                "whose kv_role is kv_producer"
            )
        return complete(self.decode[0], model, prompt, request_id, **more, kv_transfer_params=params)


def run_check(urls: Sequence[str], extra: ExtraConfig, *, json_output: bool) -> int:
    """Check and print one line. Returns the exit code, 1 if KV was not transferred or an answer differs.

    Raises ``ConfigError``: the URLs are not a router, or P and D, or no key can be read.
    """
    checked = check(route_of(urls), extra)
    print(
        msgspec.json.encode(asdict(checked)).decode() if json_output else printable(str(checked)), flush=True
    )
    return 1 if checked.problem else 0


def route_of(urls: Sequence[str]) -> Route:
    """The servers at one URL, a router's, or at two, P's and D's. Raises ``ConfigError``, ``PeerError``."""
    given = [url.rstrip("/") for url in urls]
    if wrong := [url for url in given if not url.startswith(("http://", "https://"))]:
        raise ConfigError(f"the address is {wrong[0]!r}; accepted: a URL, as http://HOST:PORT")
    if len(given) == 2:
        return Route("", (given[0],), (given[1],))
    if len(given) != 1:
        raise ConfigError(f"{len(given)} URLs were given; accepted: a router's, or P's and D's")
    samples = read_samples(given[0])
    nodes: dict[str, list[str]] = {"prefill": [], "decode": []}
    for (name, labels), _ in samples.items():
        if name == _HEALTHY:
            node = dict(labels)
            nodes[node["role"]].append(node["node"].partition("@")[0])
    if not nodes["prefill"] or not nodes["decode"]:
        raise ConfigError(
            f"{given[0]} is not `kvconnect router` before prefill and decode servers; accepted: its URL, or "
            "two URLs, the prefill server's and the decode server's"
        )
    return Route(given[0], tuple(nodes["prefill"]), tuple(nodes["decode"]))


def check(route: Route, extra: ExtraConfig) -> Checked:
    """Try prompts until one's answer is D's own, four at most. Raises ``ConfigError`` for a wrong key.

    Answers that all begin as D's own, and differ later, are taken for D's own too: KV that is wrong turns the
    first token of most prompts.
    """
    keyring = load_keyring(extra, os.environ)
    tries: list[Checked] = []
    seed = time.time_ns()
    try:
        served = served_model(route.router or route.decode[0])
        longest = int(served.get("max_model_len") or _CHARACTERS) - 2 * _TOKENS_OUT
        characters = max(_SHORTEST, min(_CHARACTERS, longest))
        while len(tries) < _MOST_TRIES:
            request_id = f"kvconnect-check-{uuid.uuid4().hex}"
            prompt = random_text(characters, seed + len(tries))
            before = _router_samples(route)
            answer = route.ask(str(served["id"]), prompt, request_id)
            found = _judge(route, answer, list(_loads(route, extra, keyring, request_id)), before)
            if found.problem:
                return found
            tries.append(_compare(found, answer, str(served["id"]), prompt))
            if len(tries) >= _LEAST_TRIES and not all(one.problem for one in tries):
                return replace(tries[-1], problem="", equal_tokens=tries[-1].answered_tokens)
    except ConfigError:
        raise
    except KVConnectError as error:
        return Checked(str(error))
    least = min(one.equal_tokens for one in tries)
    return replace(tries[-1], problem="", equal_tokens=least) if least else tries[-1]


def _router_samples(route: Route) -> Samples:
    return read_samples(route.router) if route.router else {}


def _loads(route: Route, extra: ExtraConfig, keyring: Any, request_id: str) -> Iterator[tuple[str, Outcome]]:
    """The outcomes of a request's loads, one a rank, each with the URL of its decode server."""
    for url in route.decode:
        for worker in side_channels(url, "the decode server"):
            _, holds = look(extra, keyring, worker, request=request_id, whole=False)
            yield from ((url, outcome) for outcome in holds.ended)


def _judge(
    route: Route, answer: Mapping[str, Any], loads: Sequence[tuple[str, Outcome]], before: Samples
) -> Checked:
    """What the loads of a request show."""
    if not loads:
        after = _router_samples(route)
        reasons = {dict(labels).get("reason", "") for name, labels in after if name == _FALLBACKS}
        grown = sorted(one for one in reasons if growth(before, after, _FALLBACKS, reason=one))
        why = f": the router sent it to the decode server alone ({', '.join(grown)})" if grown else ""
        return Checked(
            f"no decode server loaded KV for the request{why}; `kvconnect doctor --peer` asks each server "
            "for what is wrong, and their logs have it"
        )
    if failed := [outcome for _, outcome in loads if outcome.reason is not None]:
        return Checked(str(failed[0]))
    decode, first = loads[0]
    at = {channel: url for url in route.prefill for channel in side_channels(url, "the prefill server")}
    return Checked(
        prefill=at.get(first.channel, f"the server of {first.peer}"),
        decode=decode,
        prompt_tokens=int(answer.get("usage", {}).get("prompt_tokens", 0)),
        loaded_tokens=max(outcome.num_tokens for _, outcome in loads),
        total_bytes=sum(outcome.total_bytes for _, outcome in loads),
        seconds=max(outcome.seconds for _, outcome in loads),
        lane="+".join(sorted({outcome.lane for _, outcome in loads})),
    )


def _compare(found: Checked, answer: Mapping[str, Any], model: str, prompt: str) -> Checked:
    """Compare the answer with what D computes by itself: with a salt of its own it finds no KV of others."""
    more: dict[str, Any] = {
        "max_tokens": _TOKENS_OUT,
        "return_token_ids": True,
        "cache_salt": f"check {time.time_ns()}",
    }
    alone = complete(found.decode, model, prompt, **more)
    ours, own = _tokens(answer), _tokens(alone)
    unequal = (at for at, pair in enumerate(zip(ours, own, strict=False)) if pair[0] != pair[1])
    equal = next(unequal, min(len(ours), len(own)))
    problem = f"{found.decode} decodes {own} by itself, and {ours} with the KV of {found.prefill}"
    return replace(
        found,
        problem="" if ours == own else f"{problem}: they differ from token {equal + 1} on",
        answered_tokens=len(ours),
        equal_tokens=equal,
    )


def _tokens(answer: Mapping[str, Any]) -> list[Any]:
    """The generated tokens of an answer; its text's characters, where it has no ids."""
    choice = answer["choices"][0]
    return list(choice.get("token_ids") or choice["text"])
