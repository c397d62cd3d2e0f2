"""The pages in docs/ name what there is: settings, messages, files, commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kvconnect.config import Limits
from kvconnect.metrics import FAMILIES
from kvconnect.outcome import Actor, Cause
from tests import configuration_page, identity_page, metrics_page
from tests.messages import VALUE, messages

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


EXPLAINED = (
    "Triton is not installed",
    "another plugin of vLLM has the name",
    "kvconnect is tested with vLLM",
    "vLLM 0.30.0 with speculative_config",
    "kv_load_failure_policy is 'fail'",
    "the nodes of 'sources' are asked for nothing",
    "streams its input",
    "HTTP connections are open",
    # While a node or the router ends.
    "as drain_s is over",
    "requests are cut off: they did not end within",
    "and is left behind",
    "the transfer thread did not stop within",
)
"""Parts of warnings that name cause and remedy completely, and have no row in docs/troubleshooting.md."""


def test_every_warning_and_cause_has_a_row_or_explains_itself():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert len(page.split()) <= 1500
    rows = set(patterns(page))
    assert len(rows) > 40
    warnings = [one for one in messages() if one.kind == "warning" and re.search(r"\w", fixed(one.text))]
    assert len(warnings) > 80
    for one in warnings:
        is_cause = f"`[{one.about}]`" in page
        has_row = is_cause or any(row.search(one.text) for row in rows)
        explains = [part for part in EXPLAINED if part in one.text]
        assert has_row or explains, f"docs/troubleshooting.md has no row for {one}"
        assert not (has_row and explains), f"it has a row, and is in EXPLAINED: {one}"
    for part in EXPLAINED:
        assert any(part in one.text for one in warnings), f"no warning has {part!r}"
    for cause in Cause:
        assert cause is Cause.ABORTED or f"`[{cause.value}]`" in page, f"the page lacks {cause}"
        assert cause.remedy or cause.actor is Actor.NONE


def fixed(text: str) -> str:
    """The parts of a message's text that are always the same, but for that further ones are counted."""
    return re.sub(r"\(further [^)]*\)", "", text).replace(VALUE, "")


def patterns(page: str) -> Iterator[re.Pattern[str]]:
    """The messages of the page's tables. Capitals stand for a value."""
    for table in page.split("| message |")[1:]:
        for cell in re.findall(r"^\| (.*?) \|", table.partition("\n\n")[0], re.M):
            for shown in re.findall(r"`([^`]+)`", cell):
                parts = [re.escape(part.strip()) for part in re.split(r"\b[A-Z]\b", shown)]
                assert max(map(len, parts)) > 10, f"too vague: {shown}"
                yield re.compile(".*".join(parts))


def test_the_messages_to_look_for_are_those_of_the_program():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    program = texts()
    for row in patterns(page):
        for fragment in row.pattern.replace("\\", "").split(".*"):
            if len(fragment) > 2:
                assert any(fragment in text for text in program), f"no text has {fragment!r}"


def test_no_message_names_a_bound_that_is_no_setting():
    bounds = re.compile(rf"\b({'|'.join(Limits.__struct_fields__)})\b")
    assert not [one for one in messages() if one.about != "ConfigError" and bounds.search(one.text)]
    assert not [cause for cause in Cause if bounds.search(cause.remedy)]
    assert not bounds.search((ROOT / "docs" / "troubleshooting.md").read_text())


def test_no_message_shows_a_collection_as_python_writes_it():
    assert not [one for one in messages() if one.raw]


def test_links_and_paths_lead_somewhere():
    for page in PAGES:
        text = page.read_text()
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        paths = re.findall(r"`((?:kvconnect|tests|docs|deploy|benchmarks)/[\w./-]*)`", text)
        for target in links:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for target in paths:
            assert (ROOT / target).exists(), f"{page.name} names {target}"
