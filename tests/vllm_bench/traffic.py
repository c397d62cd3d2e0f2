"""One seed: what clients, the router and the operator do, drawn at random, until all is over."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.vllm_bench.engine import Engine
from tests.vllm_bench.pair import CAPACITY, Engines
from tests.vllm_bench.reference import VOCABULARY, continuation
from tests.vllm_bench.settings import EngineSettings

_MOST_TICKS = 4000
_ASK_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(eq=False)
class Call:
    """One client's request. ``legs`` are the engines and ids that compute it now."""

    name: str
    prompt: list[int]
    num_tokens: int
    flow: str
    num_answers: int = 1
    waits: int = 0
    params: dict[str, Any] | None = None
    legs: list[tuple[Engine, str]] = field(default_factory=list)
    left: bool = False


class Traffic:
    """Drives the engines through one seed.

    Raises:
        AssertionError: bytes or tokens were wrong, a request ended as it must not, or something is left.
    """

    def __init__(self, engines: Engines, seed: int) -> None:
        self.engines, self.seed = engines, seed
        self.trace: list[str] = []
        self.counts: dict[str, int] = {}
        self._rng = random.Random(f"{seed} traffic")
        self._calls: list[Call] = []
        self._to_come = self._rng.randint(4, 14 if len(engines.all) == 2 else 30)
        self._num_calls = 0
        self._seen: list[list[int]] = []
        self._longest = self._rng.choice((40, 100, 200))
        self._most_tokens = self._rng.choice((4, 20, 60))
        self._parts = [
            [self._rng.randrange(VOCABULARY) for _ in range(self._longest)]
            for _ in range(self._rng.randint(1, 4))
        ]
        # Clients that ask the same again, as with a system prompt, use what tiers hold under its hashes.
        self._repeats = self._rng.choice((0.0, 0.3, 0.9))
        self._policy = self._rng.choice(("recompute", "fail"))
        self._rate = self._rng.choice((0.1, 0.5, 1.0))
        self._abort_rate = self._rng.choice((0.0, 0.01, 0.04))
        self._reset_rate = self._rng.choice((0.0, 0.01, 0.04, 0.1))
        for engine in engines.all:
            engine.begin(self._settings(engine), random.Random(f"{seed} {engine.name}"))
            self._note(f"{engine.name}: {engine.settings}")

    def _settings(self, engine: Engine) -> EngineSettings:
        rng = self._rng
        num_drafts = rng.choice((0, 0, 1, 3))
        tokens = self._longest + self._most_tokens + 2 * num_drafts + 1
        least = 2 + num_drafts + sum(
            -(-tokens // group.block_size) + 2 + num_drafts for group in engine.model.groups
        )  # fmt: skip
        return EngineSettings(
            num_blocks=min(CAPACITY, int(least * rng.choice((1.0, 1.3, 2.0, 4.0)))),
            max_num_seqs=rng.choice((2, 4, 8)),
            max_batch_tokens=rng.choice((32, 64, 256)),
            is_async=rng.random() < 0.5,
            is_v2=rng.random() < 0.5,
            num_drafts=num_drafts,
            policy=self._policy,
            is_late=rng.random() < 0.5,
        )

    def run(self) -> None:
        """Until every request has ended and nothing is left."""
        for tick in range(_MOST_TICKS):
            self._tick = tick
            self._arrive()
            self._disturb()
            engines = list(self.engines.all)
            self._rng.shuffle(engines)
            for engine in engines:
                if engine.is_busy and self._rng.random() < 0.9:
                    engine.step()
            self._go_on()
            if not (self._to_come or self._calls or any(engine.is_busy for engine in self.engines.all)):
                break
        else:
            states = {engine.name: engine.leftovers() for engine in self.engines.all}
            raise AssertionError(
                f"not over after {_MOST_TICKS} ticks: {[call.name for call in self._calls]}; {states}"
            )
        for engine in self.engines.all:
            left = engine.leftovers()
            assert not left, f"{engine.name} is idle and has {left}"

    # Clients

    def _arrive(self) -> None:
        if not self._to_come or self._rng.random() > self._rate:
            return
        self._to_come -= 1
        self._num_calls += 1
        rng = self._rng
        length = rng.randint(1, self._longest)
        if rng.random() < 0.3:
            length = max(1, length // 16 * 16 + rng.randint(-1, 1))
        shared = rng.choice((0, 16, length // 2, length, length - 1))
        prompt = (rng.choice(self._parts)[:shared] + [rng.randrange(VOCABULARY) for _ in range(length)])[
            :length
        ]
        if self._seen and rng.random() < self._repeats:
            prompt = rng.choice(self._seen)
        self._seen.append(prompt)
        flows = ("sequential", "parallel", "plain") if len(self.engines.all) == 2 else ("plain",)
        call = Call(
            f"s{self.seed}-{self._num_calls}",
            prompt,
            rng.randint(1, self._most_tokens),
            rng.choices(flows, (6, 3, 2)[: len(flows)])[0],
            num_answers=rng.choice((1, 1, 1, 2, 3)),
        )
        self._calls.append(call)
        self._note(
            f"{call.name} {call.flow} n={call.num_answers}: {len(prompt)} tokens, then {call.num_tokens}"
        )
        getattr(self, f"_begin_{call.flow}")(call)

    def _begin_plain(self, call: Call) -> None:
        self._answer(call, self._rng.choice(self.engines.all), None)

    def _begin_sequential(self, call: Call) -> None:
        prefill = self.engines.all[0]
        self._ask(call, prefill, f"{call.name}-p", 1, dict(_ASK_FOR_KV))

    def _begin_parallel(self, call: Call) -> None:
        prefill, decode = self.engines.all
        address = prefill.worker.get_handshake_metadata().address
        theirs = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": prefill.name,
            "remote_host": address.host,
            "remote_port": address.port,
            "transfer_id": call.name,
        }
        legs = [
            lambda: self._ask(call, prefill, f"{call.name}-p", 1, {**_ASK_FOR_KV, "transfer_id": call.name}),
            lambda: self._answer(call, decode, theirs),
        ]
        self._rng.shuffle(legs)
        for leg in legs:
            leg()

    def _answer(self, call: Call, engine: Engine, params: dict[str, Any] | None) -> None:
        for number in range(call.num_answers):
            self._ask(call, engine, f"{call.name}-{number}", call.num_tokens, params and dict(params))

    def _ask(
        self, call: Call, engine: Engine, request_id: str, num_tokens: int, params: dict[str, Any] | None
    ) -> None:
        call.legs.append((engine, request_id))
        engine.add(request_id, call.prompt, num_tokens, params)

    def _go_on(self) -> None:
        """Calls whose legs have ended are answered, or go to the decode engine."""
        for call in list(self._calls):
            for engine, request_id in list(call.legs):
                if request_id not in engine.ended:
                    continue
                reason, params = engine.ended[request_id]
                call.legs.remove((engine, request_id))
                self._check(call, engine, request_id, reason)
                if call.flow == "sequential" and engine is self.engines.all[0] and not call.left:
                    call.params, call.waits = params, self._rng.choice((0, 0, 1, 5))
            if call.params is not None:
                call.waits -= 1
                if call.waits < 0:
                    params, call.params = call.params, None
                    self._answer(call, self.engines.all[1], params)
            elif not call.legs:
                self._calls.remove(call)

    def _check(self, call: Call, engine: Engine, request_id: str, reason: str) -> None:
        self._count(f"{engine.name} {reason}")
        made = engine.outputs[request_id]
        is_prefill = request_id.endswith("-p")
        if is_prefill:
            # It may leave the last token to the decode engine.
            return
        self._note(f"{request_id} ended: {reason}")
        expected = continuation(engine.model.sights, call.prompt, call.num_tokens)
        if reason == "length":
            assert made == expected, f"{request_id} answered {made}, expected {expected}"
            return
        assert made == expected[: len(made)], f"{request_id} began with {made}, expected {expected}"
        if not call.left:
            assert (reason, self._policy) == ("error", "fail"), f"{request_id} ended with {reason}"

    # What goes wrong

    def _disturb(self) -> None:
        rng = self._rng
        if self._calls and rng.random() < self._abort_rate:
            self._leave(rng.choice(self._calls))
        if rng.random() < self._reset_rate:
            engine = rng.choice(self.engines.all)
            running, external = rng.random() < 0.8, rng.random() < 0.5
            # Of a pair both sides would have to say the same of their weights from then on.
            external = external and len(self.engines.all) == 1
            self._note(f"reset {engine.name} running={running} external={external}")
            self._count("resets")
            engine.reset(running=running, external=external)

    def _leave(self, call: Call) -> None:
        self._note(f"{call.name} leaves")
        self._count("clients left")
        call.left = True
        for engine, request_id in call.legs:
            if request_id not in engine.ended:
                engine.abort(request_id)
        if call.params is not None:
            # vLLM's front end tells the decode engine of requests that it rejects.
            engine, request_id = self.engines.all[1], f"{call.name}-0"
            self._ask(call, engine, request_id, call.num_tokens, call.params)
            call.params = None
            engine.abort(request_id)

    def _note(self, text: str) -> None:
        self.trace.append(f"{getattr(self, '_tick', 0)}: {text}")

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
