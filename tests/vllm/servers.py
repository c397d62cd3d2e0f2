"""Real vLLM servers as child processes, on two cores, and what tests ask of them."""

from __future__ import annotations

import http.client
import json
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from kvconnect.node.children import Child, answers, fetch_json
from kvconnect.node.pair_demo import PROTOCOLS
from tests.model_servers import (
    ANSWER_TIMEOUT_S,
    ROOT,
    START_TIMEOUT_S,
    WHEN_IMPORTED,
    ModelServer,
    random_prompt,
    running,
)
from tests.nursery import with_nursery
from tests.ports import free_port
from tests.vllm.tiny_models import Recipe

MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Where it is not 0, vLLM's CPU build runs a single rank in a process of its own too, as it does several."""
EXACT = ("--dtype", "float32")
"""Options of a server whose answer to a prompt does not change with how its tokens, and other requests, are
divided over steps and ranks. Each division rounds otherwise: in float32 too little to change a token, in
bfloat16 on some processors enough."""
OBSERVED = "tests.vllm.observed"
"""A connector module that writes down what it holds and loads; see there."""

ASK_FOR_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

NIXL_CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
"""A connector of vLLM's own, to compare with."""


def transfer_config(role: str, engine: str, module: str = "kvconnect.vllm", **more: Any) -> dict[str, Any]:
    """A ``kv_transfer_config``; ``more`` are keys of it, those unknown to vLLM go to the extra part.

    The engine carries the bytes, as between machines, unless ``more`` has the protocol ``auto``.
    """
    top = {key: more.pop(key) for key in ("engine_id", "kv_load_failure_policy") if key in more}
    return {
        "kv_connector": "KVConnect",
        "kv_connector_module_path": module,
        "kv_role": f"kv_{role}",
        **top,
        "kv_connector_extra_config": {"engine": engine, "protocol": PROTOCOLS.get(engine, "auto"), **more},
    }


class Server(ModelServer):
    """One vLLM server process, which is started at once."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        name: str,
        cpu: str,
        config: dict[str, Any] | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str | None] | None = None,
        python: str = sys.executable,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._answer_timeout_s = answer_timeout_s
        self.observations = folder / f"{name}.observed"
        self.observations.mkdir(exist_ok=True)
        command = ["--model", str(recipe.folder), "--enforce-eager"]
        command += ["--max-model-len", "4096", "--dtype", "bfloat16", "--block-size", "128"]
        command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "512", *recipe.options, *options]
        if config:
            command += ["--kv-transfer-config", json.dumps(config)]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cpu,
            # As on a GPU, one rank runs in its engine's process: one more would import all of vLLM again, a
            # third of a start. Several ranks, and the commands of the deployment files, have the other way.
            MULTIPROCESSING: "0",
            "KVCONNECT_TEST_OBSERVATIONS": str(self.observations),
            **WHEN_IMPORTED,
            **(environment or {}),
        }
        module = "vllm.entrypoints.openai.api_server"
        super().__init__(folder, name, module, command, environment, python)
        self.start()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        super().wait_ready(timeout_s)
        # Not with a decode as the first forward: on some processors vLLM's kernel dies of it.
        self.tokens([1, 2, 3, 4, 5])
        return self.url

    def ask(self, prompt: list[int], **more: object) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, **more}
        answer: dict[str, Any] = json.loads(self.fetch("/v1/completions", body, self._answer_timeout_s))
        return answer

    def tokens(self, prompt: list[int], **more: object) -> list[int]:
        return list(self.ask(prompt, **more)["choices"][0]["token_ids"])

    def local_tokens(self, prompt: list[int], **more: object) -> list[int]:
        """What this server answers by itself: with a salt of its own, no prefix of others is used."""
        return self.tokens(prompt, cache_salt=f"local {random.random()}", **more)

    def prefilled(self, prompt: list[int], **more: object) -> dict[str, Any]:
        """The parameters for a decode server, after this one computed the prompt."""
        answer = self.ask(prompt, max_tokens=1, kv_transfer_params=ASK_FOR_KV, **more)
        return dict(answer["kv_transfer_params"])

    def from_prefill(self, prefill: Server, prompt: list[int], **more: object) -> list[int]:
        """What this one answers to a prompt that ``prefill`` computes for it."""
        return self.tokens(prompt, kv_transfer_params=prefill.prefilled(prompt), **more)

    def abandon(self, prompt: list[int], after_s: float, **more: object) -> None:
        """Ask as a client that closes its connection ``after_s`` later, whatever came until then."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 64, "ignore_eos": True, **more}
        with asking(self.url, body):
            time.sleep(after_s)

    def wait_idle(self, within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while self.used_blocks() > 0:
            assert time.monotonic() < deadline, (
                f"{self.name}: {self.used_blocks():.4f} of the cache is in use\n{self.logs()}"
            )
            time.sleep(0.1)

    def loaded_tokens(self) -> float:
        return self.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)

    def used_blocks(self) -> float:
        """The part of the KV cache that is in use, 0 to 1."""
        return self.metrics()["vllm:kv_cache_usage_perc"]

    def observed(self, kind: str) -> list[dict[str, Any]]:
        """What the observing connector wrote down of one kind, over all ranks; the kinds are its own."""
        records = []
        for path in sorted(self.observations.glob("*.jsonl")):
            # What follows the last line's end is being written.
            records += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return [record for record in records if record["kind"] == kind]

    def wait_observed(self, kind: str, count: int, within_s: float = 30.0) -> None:
        """Wait until the observing connector wrote down ``count`` of a kind."""
        deadline = time.monotonic() + within_s
        while len(self.observed(kind)) < count:
            assert time.monotonic() < deadline, f"{self.name}: not {count} of {kind}\n{self.logs()}"
            time.sleep(0.001)


@contextmanager
def asking(
    url: str, body: Mapping[str, Any], timeout_s: float = ANSWER_TIMEOUT_S
) -> Iterator[http.client.HTTPConnection]:
    """A client that has asked for a completion, and leaves at the end."""
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
    try:
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        yield client
    finally:
        client.close()


def chat_options(folder: Path) -> list[str]:
    """Options of a server whose model has no chat template of its own."""
    template = folder / "chat.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
    )
    return ["--chat-template", str(template)]


@contextmanager
def answering(
    url: str,
    path: str,
    command: Sequence[str],
    environment: Mapping[str, str | None] | None = None,
    *,
    start_s: float = 60,
    end_s: float = 60,
) -> Iterator[str]:
    """A process while it answers ``path`` at ``url``; it has to end by itself once it is asked to."""
    child = Child(url, command, environment=environment, url=url, cwd=ROOT).start()
    try:
        child.wait_until(lambda: answers(url + path), start_s)
        yield url
    finally:
        child.ask_to_end()
        child.process.wait(end_s)


@contextmanager
def router(*options: str) -> Iterator[str]:
    """``kvconnect router`` before servers that are up; where it listens."""
    port = free_port()
    command = [sys.executable, "-m", "kvconnect", "router", "--port", str(port), *options]
    with answering(f"http://127.0.0.1:{port}", "/ready?all", command) as url:
        yield url


def routed(url: str, prompt: object, **more: object) -> list[list[int]]:
    """The tokens of each answer to a prompt, or to several, through a router."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = fetch_json(url + "/v1/completions", {**body, "return_token_ids": True, **more}, 120)
    return [choice["token_ids"] for choice in answer["choices"]]


def forked() -> AbstractContextManager[None]:
    """Servers of this interpreter are forked meanwhile, by a process that has imported vLLM."""
    return with_nursery(Server, "tests.vllm.forked_server", WHEN_IMPORTED)


def members(server: Server) -> list[int]:
    """The processes of a server, the first one first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                group = int((entry / "stat").read_text().rpartition(")")[2].split()[2])
            except (OSError, ValueError):
                continue
            if group == server.pid:
                found.append(int(entry.name))
    return sorted(found)


@contextmanager
def stopped(*servers: Server) -> Iterator[None]:
    """Servers whose processes stand still meanwhile."""
    for server in servers:
        server.send(signal.SIGSTOP)
    try:
        yield
    finally:
        # A stopped process does not end.
        for server in servers:
            server.send(signal.SIGCONT)


@contextmanager
def awake(servers: Sequence[Server]) -> Iterator[None]:
    """Servers that stand still go on meanwhile."""
    for server in servers:
        server.send(signal.SIGCONT)
    time.sleep(0.2)
    try:
        yield
    finally:
        for server in servers:
            server.send(signal.SIGSTOP)


@contextmanager
def reference_pair(recipe: Recipe, folder: Path) -> Iterator[tuple[Server, Server]]:
    """A pair over a connector of vLLM's own: it cuts a prompt where ours does, and shares no code with it."""
    made = [
        Server(
            recipe,
            folder,
            name,
            cpu,
            NIXL_CONNECTOR,
            # A reference is left as vLLM runs it.
            environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), MULTIPROCESSING: None},
        )
        for name, cpu in (("reference-prefill", "0"), ("reference-decode", "1"))
    ]
    with running(*made):
        yield made[0], made[1]


@contextmanager
def pair(
    recipe: Recipe,
    folder: Path,
    engine: str,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    options: Sequence[str] = (),
    prefill_options: Sequence[str] = (),
    decode_options: Sequence[str] = (),
    cpus: tuple[str, str] = ("0", "1"),
    environment: dict[str, str] | None = None,
    **shared: Any,
) -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode server that write down what they move."""
    configs = [
        transfer_config(role, engine, OBSERVED, **{**shared, **(own or {})})
        for role, own in (("producer", prefill), ("consumer", decode))
    ]
    more = {"environment": environment or {}}
    both = Server(recipe, folder, "prefill", cpus[0], configs[0], [*options, *prefill_options], **more)
    other = Server(recipe, folder, "decode", cpus[1], configs[1], [*options, *decode_options], **more)
    with running(both, other):
        # Blocks that only the decode server has used: equal ids on both sides would hide a mix-up.
        # No test has these seeds: it would find the beginning of its prompts there.
        for seed in range(3):
            other.tokens(random_prompt(300, 1_000_000 + seed))
        yield both, other
