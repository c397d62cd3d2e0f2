"""The sample package of docs/engines.md passes the contract, installed as another distribution's engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvconnect.engine.base import Engine
from kvconnect.engine.registry import available_engines, create_engine
from kvconnect.errors import EngineError
from tests.engine.engine_suite import Driver, EngineSuite

ROOT = Path(__file__).parents[2]
CONFIG = json.dumps({"kv_role": "kv_both", "kv_connector_extra_config": {"engine": "cma"}})


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory) -> Iterator[Path]:
    """A folder of ``sys.path`` that pip has installed the package into."""
    folder = tmp_path_factory.mktemp("sample")
    # A build leaves files beside its source.
    source = shutil.copytree(Path(__file__).parent / "sample_package", folder / "source")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip, "--target", str(folder / "site"), str(source)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder / "site")
        if problem := available_engines()["cma"]:
            pytest.skip(problem)
        yield folder / "site"


def make_engine() -> Engine:
    return create_engine("cma", host="127.0.0.1")


class TestCmaEngine(EngineSuite):
    make_engine = staticmethod(make_engine)
    settle_s = 1.0


def test_a_card_stands_for_one_process_of_this_machine() -> None:
    driver = Driver(make_engine())
    card = msgspec.msgpack.decode(driver.engine.card())
    later, elsewhere = (msgspec.msgpack.encode(card | other) for other in ({"started": ""}, {"machine": ""}))
    driver.engine.connect("peer", driver.engine.card())
    replaced = driver.submit("peer", driver.address, driver.address, 64)
    driver.engine.connect("peer", later)
    assert "disconnected" in driver.wait(replaced).error
    assert "has ended" in driver.copy("peer", driver.address).error
    with pytest.raises(EngineError, match="not of this machine"):
        driver.engine.connect("peer", elsewhere)


def run(site: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}
    command = [sys.executable, "-m", "kvconnect", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_doctor_names_it_and_writes_over_it(site) -> None:
    findings = json.loads(run(site, "doctor", "--json", "--kv-transfer-config", CONFIG))["findings"]
    (engine,) = (finding for finding in findings if finding["about"] == "engine cma")
    assert (engine["level"], engine["found"]) == ("pass", "cma: cma")


@pytest.mark.full
def test_the_demo_is_exact_over_it(site) -> None:
    (line,) = run(site, "demo", "--engine", "cma", "--model", "gqa", "--requests", "2").splitlines()
    assert line.startswith("ok     cma/gqa")
    assert "over shared_memory" in line
