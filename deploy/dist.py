"""Build the sdist and the wheel of a commit: the same commit and setuptools give the same bytes.

    python deploy/dist.py [FOLDER [COMMIT]]

The sdist has what the wheel is built from, and the wheel is built from the sdist. setuptools is that of this
interpreter, called by its PEP 517 hooks.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CONTENTS = ("pyproject.toml", "README.md", "LICENSE", "kvconnect")
ROOT = Path(__file__).parents[1]


def main(folder: str = "dist", commit: str = "HEAD") -> None:
    os.umask(0o022)  # the modes of files are part of both archives
    out = Path(folder).resolve()
    out.mkdir(parents=True, exist_ok=True)
    git = ("git", "-C", str(ROOT))
    epoch = subprocess.check_output([*git, "log", "-1", "--format=%ct", commit], text=True).strip()
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "source")
        source.mkdir()
        # Of the commit, not of the checkout: no uncommitted file, and no build folder of a former run.
        archive = [*git, "-c", "tar.umask=0022", "archive", commit, *CONTENTS]
        unpack(subprocess.check_output(archive), source)
        sdist = hook("build_sdist", source, Path(place), epoch)
        normalise(sdist, out / sdist.name, int(epoch))
        unpack(gzip.decompress((out / sdist.name).read_bytes()), Path(place))
        wheel = hook("build_wheel", Path(place, sdist.name.removesuffix(".tar.gz")), out, epoch)
    print(f"{out / sdist.name}\n{wheel}")


def unpack(tar: bytes, folder: Path) -> None:
    subprocess.run(["tar", "-x", "-C", str(folder)], input=tar, check=True)


def hook(name: str, source: Path, out: Path, epoch: str) -> Path:
    """The file that setuptools builds of a source folder."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{name}(sys.argv[1]))"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"dist: {name} of setuptools failed:\n{done.stdout}{done.stderr}")
    return out / done.stdout.splitlines()[-1]


def normalise(made: Path, target: Path, epoch: int) -> None:
    """Write an sdist anew without what differs between two builds: times, owners, modes, gzip's header."""
    with (
        tarfile.open(made) as source,
        target.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for member in source:
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() else 0o644, {}
            archive.addfile(member, source.extractfile(member) if member.isfile() else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
