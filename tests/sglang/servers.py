"""Real SGLang servers as child processes, on two cores, and what tests ask of them."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvconnect.node.children import BadAnswer
from kvconnect.node.pair_demo import PROTOCOLS
from tests import model_servers
from tests.model_servers import ANSWER_TIMEOUT_S, ROOT, ModelServer, random_prompt, running
from tests.nursery import with_nursery
from tests.ports import free_port

PAGE_TOKENS = 16
CHUNK_TOKENS = 512
MAX_TOTAL_TOKENS = 16384
_LOGS = "\nthe servers' logs:\n"
PREFILL_SIDE, DECODE_SIDE = 0, 1
_NOWHERE = "2.2.2.2"
"""The bootstrap host with which SGLang's own warm-up skips the transfer."""
_RANDOM = random.SystemRandom()
STAND_INS = Path(__file__).parent / "stand_ins"
WHEN_IMPORTED = {
    **model_servers.WHEN_IMPORTED,
    # Without it, SGLang takes a machine without a GPU for one whose GPU is not found.
    "SGLANG_USE_CPU_ENGINE": "1",
    # A page that no request and no prefix accounts for ends the server.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    # /health answers without a request of its own, which takes a second.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "PYTHONPATH": f"{STAND_INS}{os.pathsep}{ROOT}",
}
"""What the environment of every server has, and is read when SGLang is imported."""
COMMON = (
    *("--device", "cpu", "--dtype", "float32", "--page-size", str(PAGE_TOKENS)),
    *("--max-total-tokens", str(MAX_TOTAL_TOKENS), "--chunked-prefill-size", str(CHUNK_TOKENS)),
    *("--context-length", "4096", "--max-running-requests", "16", "--enable-metrics", "--sleep-on-idle"),
)
PREFILL = ("--disaggregation-mode", "prefill", "--disable-overlap-schedule")
LINKED = (
    *("--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic"),
    "--unified-cache-external-linker-config",
    json.dumps({"linker": "KVConnectLinker", "linker_module_path": "kvconnect.sglang.linker"}),
)
DECODE = ("--disaggregation-mode", "decode", "--disaggregation-decode-retraction-backup", "cpu_tensor")


def settings(engine: str, own: Mapping[str, Any] | None = None, **shared: Any) -> dict[str, str]:
    """The variable that configures kvconnect. The engine carries the bytes, as between machines."""
    chosen = {"engine": engine, "protocol": PROTOCOLS.get(engine, "auto"), **shared, **(own or {})}
    return {"KVCONNECT_CONFIG": json.dumps(chosen)}


class SglangServer(ModelServer):
    end_timeout_s = 0.0

    def __init__(
        self,
        model: Path,
        folder: Path,
        name: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        self.bootstrap_port = 0
        command = ["--model-path", str(model), "--host", "127.0.0.1", *COMMON, *options]
        changed = {**WHEN_IMPORTED, **(environment or {})}
        super().__init__(folder, name, "sglang.launch_server", command, changed)

    def ask(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """What it answers by itself, greedily."""
        return dict(json.loads(self.fetch("/generate", generation(prompt, **more))))

    def tokens(self, prompt: list[int], **more: Any) -> list[int]:
        return list(self.ask(prompt, **more)["output_ids"])

    __call__ = tokens

    def held(self) -> dict[str, float]:
        """What requests hold here now: tokens in pages, and requests by queue; empty for none of it."""
        (load,) = json.loads(self.fetch("/v1/loads?include=disagg"))["loads"]
        counts = {**load, **load.get("disaggregation", {})}
        return {
            name: value
            for name, value in counts.items()
            if value and (name.endswith("_reqs") or name == "num_used_tokens")
        }

    def wait_idle(self, within_s: float = 30.0) -> None:
        """Wait until no request holds a page; pages that a prefix in the cache accounts for do not count."""
        deadline = time.monotonic() + within_s
        while held := self.held():
            assert time.monotonic() < deadline, f"{self.name} still holds {held}\n{self.logs()}"
            time.sleep(0.2)

    def use_pages(self, tokens: int) -> None:
        """Compute a prompt on a prefill server that goes nowhere: its pages stay in the prefix cache."""
        body = generation(random_prompt(tokens, tokens), 1)
        self.fetch("/generate", body | {"bootstrap_host": _NOWHERE, "bootstrap_room": 0})


def generation(prompt: list[Any], max_new_tokens: int = 16, **more: Any) -> dict[str, Any]:
    """The body of a request to ``/generate``."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, **more}


class Asked:
    """A request as a router sends it: the same body to both servers, with the room where they meet.

    ``more`` are keys of the body; ``decode_only`` are keys of D's body alone.
    """

    def __init__(
        self,
        prefill: SglangServer,
        decode: SglangServer,
        prompt: list[int],
        *,
        room: int | None = None,
        decode_only: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.room = _RANDOM.getrandbits(63) if room is None else room
        body = generation(prompt, **more)
        body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap_port}
        body["bootstrap_room"] = self.room
        self._servers = prefill, decode
        self.began = time.monotonic()
        self._clients = []
        for server, own in ((prefill, {}), (decode, decode_only or {})):
            client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_TIMEOUT_S)
            client.request("POST", "/generate", json.dumps(body | own), {"Content-Type": "application/json"})
            self._clients.append(client)

    def answer(self, at: int = DECODE_SIDE) -> dict[str, Any]:
        """What D (1) or P (0) answers. Raises ``BadAnswer`` for an error; its text has the reason."""
        server = self._servers[at]
        try:
            response = self._clients[at].getresponse()
            raw = response.read()
        except OSError as error:
            raise BadAnswer(f"{server.url} gave no answer: {error!r}") from error
        if response.status != 200:
            raise BadAnswer(f"{server.url} answered {response.status}: {raw[:1000]!r}{_LOGS}{server.logs()}")
        return dict(json.loads(raw))

    def lines(self) -> Iterator[bytes]:
        """The events of D's streamed answer, as they come."""
        for line in self._clients[DECODE_SIDE].getresponse():
            if line.startswith(b"data: {"):
                yield line

    def tokens(self) -> list[int]:
        """D's answer; P has answered too when this returns."""
        try:
            tokens = list(self.answer()["output_ids"])
            self.answer(PREFILL_SIDE)
        finally:
            self.leave()
        return tokens

    def reason(self, at: int = DECODE_SIDE) -> str:
        """The error that a server answers with; an answer without one fails."""
        with pytest.raises(BadAnswer) as caught:
            self.answer(at)
        return str(caught.value).partition(_LOGS)[0]

    def leave(self) -> None:
        """Close both connections, as a client that has left, through its router."""
        for client in self._clients:
            client.close()

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def prefill_server(
    model: Path, folder: Path, backend: str, name: str = "prefill", **more: Any
) -> SglangServer:
    """A prefill server over a transfer backend, not yet started. ``more`` are of ``SglangServer``."""
    port = free_port()
    options = [*PREFILL, "--disaggregation-transfer-backend", backend]
    options += ["--disaggregation-bootstrap-port", str(port), *more.pop("options", ())]
    server = SglangServer(model, folder, name, options, **more)
    server.bootstrap_port = port
    return server


def decode_server(model: Path, folder: Path, backend: str, name: str = "decode", **more: Any) -> SglangServer:
    """A decode server over a transfer backend, not yet started. ``more`` are of ``SglangServer``."""
    options = [*DECODE, "--disaggregation-transfer-backend", backend, *more.pop("options", ())]
    return SglangServer(model, folder, name, options, **more)


@contextmanager
def pair(
    model: Path,
    folder: Path,
    engine: str,
    *,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    prefill_options: Sequence[str] = (),
    decode_options: Sequence[str] = (),
    **shared: Any,
) -> Iterator[tuple[SglangServer, SglangServer]]:
    """A pair over kvconnect whose page ids differ; ``shared`` are settings of both servers."""
    made = (
        prefill_server(
            model,
            folder,
            "kvconnect",
            options=prefill_options,
            environment=settings(engine, prefill, **shared),
        ),
        decode_server(
            model, folder, "kvconnect", options=decode_options, environment=settings(engine, decode, **shared)
        ),
    )
    with running(*made) as (p, d):
        # Equal ids on both sides would hide a mix-up.
        p.use_pages(37 * PAGE_TOKENS)
        yield p, d


def forked() -> AbstractContextManager[None]:
    """Servers of this interpreter are forked meanwhile, by a process that has imported SGLang."""
    return with_nursery(SglangServer, "tests.sglang.forked_server", WHEN_IMPORTED)
