"""Whatever a stack and its ranks do to the scheduler half, no byte is wrong and nothing is left behind."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.offload.half_kit import Kind, Stack

MIXES = {
    "full": (Kind(4),),
    "sliding": (Kind(4), Kind(2, window=7)),
    "chunked": (Kind(4), Kind(2, chunk=6)),
    "hybrid": (Kind(4), Kind(8, is_state=True)),
    "draft": (Kind(4), Kind(4, is_draft=True), Kind(2, window=9, is_draft=True)),
    "sizes": (Kind(8, row_bytes=128), Kind(2, window=5), Kind(8, is_state=True, row_bytes=256)),
}


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go, share beginnings and lose blocks; ranks answer late, fail, or not at all."""

    @initialize(
        mix=st.sampled_from(sorted(MIXES)),
        tiers=st.sampled_from([(), ("disk",), ("store",), ("disk", "store")]),
        num_ranks=st.integers(1, 3),
        rows=st.sampled_from([30, 120, 2000]),
        seed=st.integers(0, 1000),
        settings_of=st.fixed_dictionaries(
            {
                "checkpoint_tokens": st.sampled_from([0, 16]),
                "wait_s": st.sampled_from([0.02, 2.0]),
                "decoded": st.booleans(),
                "local": st.booleans(),
                "reuses_at_once": st.booleans(),
                "budget": st.sampled_from([7, 16, 40]),
            }
        ),
    )
    def begin(self, mix, tiers, num_ranks, rows, seed, settings_of) -> None:
        kinds = MIXES[mix]
        drafts = 0 if any(kind.is_state for kind in kinds) else seed % 4
        self.stack = Stack(
            kinds,
            8,
            seed=seed,
            tiers=tiers,
            rows=rows,
            num_ranks=num_ranks,
            num_blocks=150,
            drafts=drafts,
            **settings_of,
        )
        self.prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
        self.serial = 0

    @rule(which=st.integers(0, 50), cut=st.integers(0, 60), fresh=st.integers(0, 30), new=st.integers(1, 12))
    def add(self, which, cut, fresh, new) -> None:
        prompt = self.prompts[which % len(self.prompts)][:cut]
        self.serial += 1
        prompt = (prompt + [self.serial % 3] * (fresh % 4) + list(range(fresh)))[:70] or [1]
        self.prompts.append(prompt)
        name = f"r{self.serial % 5}"
        if name not in self.stack.requests and name not in self.stack.loading:
            self.stack.add(name, prompt, max_new=new)

    @rule(count=st.integers(1, 6))
    def step(self, count) -> None:
        for _ in range(count):
            self.stack.step()

    @precondition(lambda self: self.stack.requests)
    @rule(which=st.integers(0, 10))
    def abort(self, which) -> None:
        names = sorted(self.stack.requests)
        self.stack.abort(names[which % len(names)])

    @precondition(lambda self: self.stack.running)
    @rule()
    def preempt(self) -> None:
        self.stack.preempts_next = True

    @rule()
    def forget_device_cache(self) -> None:
        self.stack.forget_device_cache()

    @rule()
    def clear(self) -> None:
        self.stack.half.reset()

    @rule(fail=st.sampled_from([0.0, 0.0, 0.2, 1.0]))
    def break_copies(self, fail) -> None:
        self.stack.ranks.fail = fail

    @rule(is_silent=st.booleans())
    def silence_a_rank(self, is_silent) -> None:
        self.stack.ranks.silent = {0} if is_silent else set()

    @rule(seconds=st.sampled_from([0.1, 5.0, 100.0]))
    def wait(self, seconds) -> None:
        self.stack.clock.now += seconds

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.ranks.silent, self.stack.ranks.fail = set(), 0.0
            self.stack.run()
            self.stack.check_idle()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
