"""The pages in docs/ name what there is: settings, messages, files, commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kvconnect.metrics import FAMILIES
from kvconnect.outcome import Cause
from tests import configuration_page, identity_page, metrics_page

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def texts() -> set[str]:
    """Every text in the package, the fixed parts of formatted ones each by itself."""
    found = set()
    for path in (ROOT / "kvconnect").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_the_page_of_settings_is_what_the_docstrings_are():
    path = ROOT / "docs" / "configuration.md"
    assert path.read_text() == configuration_page.page(), (
        "python -m tests.configuration_page > docs/configuration.md"
    )


def test_the_page_of_metrics_has_every_family_label_and_reason_of_the_code():
    text = metrics_page.PAGE.read_text()
    assert text == metrics_page.page(text), "python -m tests.metrics_page"
    labels = {label for family in FAMILIES for label in family.labels}
    named = set(re.findall(r"`(\w+)`", text.partition("## Labels")[2].partition("## ")[0]))
    assert labels <= named
    reasons = set(re.findall(r"`(\w+)`", text.partition("## Reasons")[2]))
    counted = {
        reason
        for path in (ROOT / "kvconnect").rglob("*.py")
        for reason in re.findall(
            r'(?:failures\.labels|\.warn|failures\.append|host\.count|\.complain)\(\s*"(\w+)"',
            path.read_text(),
        )
    }
    assert len(counted) > 20
    assert not {*counted, *(cause.value for cause in Cause if cause is not Cause.ABORTED)} - reasons


def test_the_table_of_what_kv_depends_on_is_the_list():
    text = identity_page.PAGE.read_text()
    assert text == identity_page.page(text), "python -m tests.identity_page"


def test_the_messages_to_look_for_are_those_of_the_program():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    program = texts()
    asked = [match for part in page.split("## ")[1:3] for match in re.findall(r"^\| `(.*?)` \|", part, re.M)]
    assert len(asked) > 15
    for message in asked:
        # Capitals stand for a value, which is no part of the program's text.
        for fragment in re.split(r"\b[A-Z]\b", message):
            if len(fragment.strip()) > 2:
                assert any(fragment.strip() in text for text in program), f"no text has {fragment.strip()!r}"


def test_links_and_paths_lead_somewhere():
    for page in PAGES:
        text = page.read_text()
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        paths = re.findall(r"`((?:kvconnect|tests|docs|deploy|benchmarks)/[\w./-]*)`", text)
        for target in links:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for target in paths:
            assert (ROOT / target).exists(), f"{page.name} names {target}"
