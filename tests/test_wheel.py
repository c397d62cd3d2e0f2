"""What is released: reproducible archives, a wheel of the package without tests, a demo that runs from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GIT = ("git", "-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
COMMITTED_AT = 1_600_000_000


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """The working tree as a repository of one commit."""
    source = tmp_path_factory.mktemp("wheel") / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source)
    for name in ("kvconnect", "benchmarks", "tests", "deploy"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.key"))
    environment = {**os.environ, "GIT_COMMITTER_DATE": f"{COMMITTED_AT} +0000"}
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "all")):
        subprocess.run([*GIT, *command], cwd=source, env=environment, check=True)
    return source


def build(checkout: Path, out: Path, umask: int = 0o022, **environment: str) -> dict[str, bytes]:
    """What ``make dist`` makes of a checkout, by name."""
    command = [sys.executable, "deploy/dist.py", str(out)]
    subprocess.run(command, cwd=checkout, env={**os.environ, **environment}, umask=umask, check=True)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def built(checkout) -> dict[str, bytes]:
    return build(checkout, checkout.parent / "dist")


@pytest.fixture(scope="module")
def wheel(checkout, built) -> Path:
    (name,) = (name for name in built if name.endswith(".whl"))
    return checkout.parent / "dist" / name


def test_two_builds_of_a_commit_have_the_same_bytes(checkout, built, tmp_path):
    again = tmp_path / "elsewhere"
    subprocess.run(["git", "clone", "-q", str(checkout), str(again)], umask=0o077, check=True)
    # Neither what another build left nor what is not committed.
    for stray in ("build/lib/kvconnect/stale.py", "kvconnect/uncommitted.py"):
        (again / stray).parent.mkdir(parents=True, exist_ok=True)
        (again / stray).write_text("")
    other = {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "TMPDIR": str(tmp_path)}
    assert build(again, tmp_path / "dist", 0o077, **other) == built
    wheel, sdist = (tmp_path / "dist" / name for name in sorted(built))
    assert sdist.read_bytes()[4:8] == COMMITTED_AT.to_bytes(4, "little"), "the time in gzip's header"
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert {(file.uid, file.uname, file.mtime) for file in members} == {(0, "", COMMITTED_AT)}
    metadata = {"", "PKG-INFO", "kvconnect.egg-info", "setup.cfg"}
    contents = {"LICENSE", "README.md", "kvconnect", "pyproject.toml"}
    assert {f"{file.name}/".split("/")[1] for file in members} == metadata | contents
    assert {file.date_time for file in zipfile.ZipFile(wheel).infolist()} == {time.gmtime(COMMITTED_AT)[:6]}


def test_the_checkout_itself_gives_the_same_wheel(checkout, wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(COMMITTED_AT)}
    subprocess.run([*pip, "."], cwd=checkout, env=environment, umask=0o022, check=True, capture_output=True)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_it_holds_the_product_and_none_of_its_proof(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvconnect"}
    packaged = {str(path.relative_to(ROOT)) for path in (ROOT / "kvconnect").rglob("*.py")}
    assert packaged | {"kvconnect/py.typed"} == {name for name in names if name.startswith("kvconnect/")}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


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
