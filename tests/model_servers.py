"""Real model servers as child processes: what tests ask of them whatever their stack is.

Tests that start them are marked ``servers``: others run in parallel.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from kvconnect.node.children import BadAnswer, Child, ChildFailed, fetch
from tests.nursery import Nursery
from tests.ports import free_port

START_TIMEOUT_S = 300
ANSWER_TIMEOUT_S = 120
TAIL_LINES = 60
ROOT = Path(__file__).parents[1]
WHEN_IMPORTED = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # vLLM compiles a piece of its sampler, and with several ranks one of its embedding. It dies of
    # either where there is no compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # A worker that dies of a signal says where.
    "PYTHONFAULTHANDLER": "1",
    "PYTHONPATH": str(ROOT),
}
"""What the environment of every server has, and is read when its stack is imported."""

_TROUBLE = re.compile(r"\bERROR\b|Traceback \(most recent|Fatal Python error|terminate called")


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


class ModelServer(Child):
    """One server process. ``log`` has what it and its workers printed.

    ``together`` are the servers that it moves KV with, and itself: what one of them says is often explained
    by another one's log, so failures tell all of them.
    """

    nursery: ClassVar[Nursery | None] = None
    """What forks servers, where there is one: their processes import the stack, which is most of a start."""
    end_timeout_s: ClassVar[float] = 15.0

    def __init__(
        self,
        folder: Path,
        name: str,
        module: str,
        options: Sequence[str],
        environment: Mapping[str, str | None],
        python: str = sys.executable,
    ) -> None:
        self.port = free_port()
        self.together: tuple[Any, ...] = (self,)
        command = [python, "-m", module, *options, "--served-model-name", "tiny", "--port", str(self.port)]
        super().__init__(name, command, folder / f"{name}.log", environment, f"http://127.0.0.1:{self.port}")

    def _spawn(self) -> Any:
        python, _, _, *arguments = self.command
        if self.nursery is None or python != sys.executable:
            return super()._spawn()
        assert self.log is not None
        return self.nursery.start(arguments, self.log, environment=self._environment)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        try:
            self.wait_answer("/health", timeout_s)
        except ChildFailed as error:
            raise ChildFailed(f"{error}\n{self.logs()}") from error
        return self.url

    def text(self) -> str:
        assert self.log is not None
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of the log, and what follows its first error: a worker's is long before the end."""
        text = self.text().splitlines()
        before, end = text[:-lines], text[-lines:]
        first = next((at for at, line in enumerate(before) if _TROUBLE.search(line)), None)
        if first is not None:
            end = [*before[first : first + lines], "...", *end]
        return "\n".join(end)

    def logs(self) -> str:
        """``tail`` of all servers that work together, each under its name."""
        return "\n".join(f"--- log of {server.name}:\n{server.tail()}" for server in self.together)

    def fetch(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> bytes:
        """What the server answers.

        Raises:
            BadAnswer: an error, or nothing; the text ends with ``logs``.
        """
        try:
            return fetch(self.url + path, body, timeout_s)
        except BadAnswer as error:
            raise BadAnswer(f"{error}\n{self.logs()}") from error

    def metrics(self, **labels: str) -> dict[str, float]:
        """Every sample of ``/metrics`` that carries ``labels``, summed over its other labels."""
        found: dict[str, float] = {}
        for line in self.fetch("/metrics").decode().splitlines():
            if not line.startswith("#") and all(f'{key}="{label}"' in line for key, label in labels.items()):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def end(self, grace_s: float | None = None) -> int:
        return super().end(self.end_timeout_s if grace_s is None else grace_s)


Servers = TypeVar("Servers", bound=ModelServer)


@contextmanager
def running(*servers: Servers) -> Iterator[tuple[Servers, ...]]:
    """Start those that are not, wait until all of them answer, and end them in the end."""
    for server in servers:
        server.together = servers
    try:
        for server in servers:
            if server.process is None:
                server.start()
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.ask_to_end()
        for server in servers:
            server.end()
