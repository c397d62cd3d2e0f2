"""The way of one request through the house has a bound; what it is made of is printed where it grows."""

from __future__ import annotations

import pytest

from tests.request_path import measure

MOST_FILES = 32
MOST_CALLS = {"P": 450, "D": 1100}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return dict(zip("PD", measure(tmp_path_factory.mktemp("path")), strict=True))


@pytest.mark.parametrize("side", ["P", "D"])
def test_a_request_passes_few_files_and_calls(paths, side):
    path = paths[side]
    assert len(path.files) <= MOST_FILES, str(path)
    assert path.total <= MOST_CALLS[side], str(path)
    assert {"P": "prefill/prefill_side.py", "D": "decode/decode_side.py"}[side] in path.files


@pytest.mark.parametrize(("side", "other"), [("P", "decode/"), ("D", "prefill/")])
def test_a_side_runs_nothing_of_the_other(paths, side, other):
    assert not [file for file in paths[side].files if file.startswith(other)]
