"""README's first minute: its figures are those of the demo, and its pictures need no other host."""

from __future__ import annotations

import re
import runpy

import pytest
from paths import ROOT

PICTURES = sorted((ROOT / "docs" / "pictures").iterdir())


def test_the_first_minute_says_what_the_demo_finds(tmp_path):
    pytest.importorskip("playwright")
    script = runpy.run_path(str(ROOT / "docs" / "make_pictures.py"))
    (tmp_path / "ccl-search.yaml").write_text("{}\n")
    run, recording = script["search"](tmp_path), script["load_recording"](script["RECORDING"])
    figures = script["measure_first_minute"](run, recording)
    readme = (ROOT / "README.md").read_text()
    assert [sentence for sentence in figures.sentences() if sentence not in readme] == []
    drawn = script["draw_first_minute"](run, recording)
    assert f"{figures.usual_s / figures.found_s:.2f}x faster than the usual default" in drawn
    assert (ROOT / "docs" / "pictures" / "first-minute.svg").read_text() == drawn, "make screenshots draws it again"


def test_pictures_are_small_and_load_nothing():
    assert {path.name: path.stat().st_size for path in PICTURES if path.stat().st_size > 200_000} == {}
    for path in PICTURES:
        if path.suffix == ".svg":
            outside = re.findall(r"(?:href|src|url\()\W*(https?://[^\"')\s]+)", path.read_text())
            assert outside == [], path.name
