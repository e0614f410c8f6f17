"""No behavior of a provider stops, misleads or corrupts a search."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm.cases import plain_table
from llm.chaos import run_chaos
from llm.server import KEY

from cclsearch.propose.study.choose import make_sampler


def test_every_search_completes_under_all_provider_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    report = run_chaos(
        300, tmp_path, seed=11, make_fallback=lambda: make_sampler("random"), make_table=lambda view: plain_table()
    )
    assert report.turns >= 300
    assert report.requests > report.turns
    assert report.decisions > 20
    assert report.waited_s > 60
