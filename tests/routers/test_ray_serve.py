"""The application of ``deploy/ray`` on the CPU: a prefill and a decode replica of Ray Serve LLM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-routers")

from kvconnect.node.children import answers, fetch_json
from tests.ports import free_port
from tests.vllm.servers import EXACT, OBSERVED, ROOT, Server, random_prompt, running
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

RAY = ROOT / ".venv-ray"
START_S = 180
ENGINE = {"enforce_eager": True, "max_model_len": 4096, "dtype": "float32", "block_size": 128}
ENGINE |= {"max_num_seqs": 8, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def application(tmp_path_factory):
    """The URL of the application, the folder of its records, and a server alone."""
    if not (RAY / "bin" / "serve").exists():
        pytest.skip("Ray Serve is not installed; make setup-routers")
    folder, port = tmp_path_factory.mktemp("ray"), free_port()
    recipe = write_model("gqa", folder)
    records = folder / "records"
    records.mkdir()
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "KVCONNECT_TEST_OBSERVATIONS": str(records)}
    arguments = {"model": str(recipe.folder), "cpu": "1", "module": OBSERVED}
    arguments |= {"engine_kwargs": json.dumps(ENGINE), "environment": json.dumps(environment)}
    served = {"name": "pd", "route_prefix": "/", "import_path": "pd_app:build", "args": arguments}
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [served]}
    (folder / "serve.yaml").write_text(json.dumps(config))
    own = {**os.environ, "PATH": f"{RAY}/bin:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    # Where processes that the command starts find the application, and the connector that writes records.
    own["PYTHONPATH"] = f"{ROOT}/deploy/ray:{ROOT}"
    # More processors than there are: what waits for one takes a place of its own.
    own |= {"RAY_AUTH_MODE": "disabled", "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 8})}
    url, log = f"http://127.0.0.1:{port}", folder / "serve.log"
    with log.open("w") as out:
        serve = [str(RAY / "bin" / "serve"), "run", str(folder / "serve.yaml")]
        process = subprocess.Popen(serve, cwd=ROOT, env=own, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not answers(url + "/v1/models"):
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(1)
        with running(Server(recipe, folder, "alone", "0", None, EXACT)) as (alone,):
            yield url, records, alone
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_answers_are_those_of_one_server_and_their_kv_came_over(application):
    url, records, alone = application
    prompts = [random_prompt(length, 300 + length) for length in (40, 128, 300, 900)]

    def asked(prompt):
        body = {"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = fetch_json(url + "/v1/completions", {**body, "return_token_ids": True}, 120)
        return answer["choices"][0]["token_ids"]

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(asked, prompts))
    assert got == [alone.tokens(prompt) for prompt in prompts]
    lines = [json.loads(line) for path in records.glob("*.jsonl") for line in path.read_text().splitlines()]
    holds, loads = ([line for line in lines if line["kind"] == kind] for kind in ("hold", "load"))
    assert len(holds) == len(loads) == len(prompts)
    pages = {hold["handle"]: hold["pages"] for hold in holds}
    assert [load["pages"] for load in loads] == [pages[load["handle"]] for load in loads]
