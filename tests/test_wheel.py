"""What is installed: a wheel holds the product and none of its proof, and the demo runs from it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout; of a copy of it, so that no build folder of another run is in it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "kvconnect", "benchmarks", "tests"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*pip, str(source)], check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


def test_it_holds_the_product_and_none_of_its_proof(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvconnect"}
    assert "kvconnect/cli/__init__.py" in names
    assert "kvconnect/vllm/connector.py" in names


@pytest.mark.timeout(300)
def test_the_demo_runs_from_it(wheel, tmp_path):
    pytest.importorskip("nixl._api")
    place = tmp_path / "env"
    venv.create(place, with_pip=False)
    (site,) = place.glob("lib/python*/site-packages")
    # The dependencies are those of this environment; kvconnect is the one that was unpacked here.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = [str(place / "bin" / "python"), "-m", "kvconnect"]
    where = [str(place / "bin" / "python"), "-c", "import kvconnect; print(kvconnect.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    assert found.stdout.startswith(str(place))
    command = [*run, "demo", "--engine", "nixl", "--model", "mixed", "--requests", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
