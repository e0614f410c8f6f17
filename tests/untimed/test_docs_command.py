"""`ccl-search docs` lists, prints and searches the pages of the documentation."""

from __future__ import annotations

import re

import pytest
from paths import ROOT
from terminals import Terminal

from cclsearch.cli import main

DOCS = ROOT / "docs"


def test_every_page_is_listed_with_its_title(cli):
    titles = cli.json(["docs", "--json"])
    assert sorted(titles) == sorted(path.stem for path in DOCS.glob("*.md"))
    assert titles["your-cluster"] == "A profile for your cluster"


def test_a_page_is_printed_as_it_is_written_if_no_terminal_shows_it(capsys):
    assert main(["docs", "exit-codes"]) == main(["docs", "exit-codes.md"]) == 0
    assert capsys.readouterr().out == 2 * (DOCS / "exit-codes.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["../README", "/etc/passwd", "your-clster", ""])
def test_only_pages_are_read(page, capsys):
    assert main(["docs", page]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"ccl-search: there is no page {page!r}")
    assert ("did you mean 'your-cluster'?" in shown.err) == (page == "your-clster")


def test_text_is_found_whatever_its_case(cli):
    lines = cli.out(["docs", "--find", "NODE-HOURS"]).splitlines()
    assert lines
    assert all(re.match(r"[a-z-]+:\d+: .*node-hours", line, re.IGNORECASE) for line in lines)
    assert main(["docs", "--find", "no such words anywhere"]) == 1


def test_a_terminal_shows_a_page_with_headings_and_without_markup(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGER", "cat")
    shown = Terminal("docs", "exit-codes", folder=tmp_path, columns=100, rows=60)
    assert shown.finish() == 0
    text = "\n".join(shown.lines)
    assert "Exit codes" in text
    assert "# Exit codes" not in text
