"""The report in a real browser, under its own content policy: charts, table, keyboard, themes, accessibility."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_pages import HOSTILE, make_page, make_trial

from cclsearch.charts.parts import Lane
from cclsearch.report.data import StepOfRanks
from cclsearch.report.page import render_page
from cclsearch.report.rows import TurnMessage, TurnView

AXE_RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}


def write_page(folder: Path) -> Path:
    trials = tuple(make_trial(n, 1.0 / n if n % 5 else None) for n in range(1, 16))
    lanes = tuple(
        Lane(rank, kind, [(0.0, 1.0), (2.0, 3.0)]) for rank in (0, 1) for kind in ("compute", "communication")
    )
    message = TurnMessage("assistant", "LLM", HOSTILE)
    page = make_page(
        trials=(*trials[:13], replace(trials[13], files=("stdout.log",))),
        best=14,
        launch="torchrun train.py",
        folder=folder,
        importance={"tp": 0.6, "checkpointing": 0.4},
        step=StepOfRanks(14, {0: {"compute": 0.4}, 1: {"compute": 0.3, "wait": 0.1}}, lanes, 0),
        turns=(TurnView(1, "submit", (message,)),),
        environment=(("torch", "2.13"),),
    )
    (folder / "report.html").write_text(render_page([page], base=folder), encoding="utf-8")
    return folder / "report.html"


@pytest.fixture(params=[(1280, "light"), (400, "dark")], ids=["wide-light", "400px-dark"])
def opened(request: pytest.FixtureRequest, browser: Any, tmp_path: Path) -> Iterator[tuple[Any, list[str]]]:
    """The page with every chart drawn, and what the browser complained about."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.goto(write_page(tmp_path).as_uri())
    page.wait_for_function("window.cclCharts !== undefined")
    page.evaluate("cclCharts.drawAll()")
    page.wait_for_function("document.querySelectorAll('[data-drawn=yes]').length >= 10")
    yield page, complaints
    context.close()


def test_report_works_in_a_browser(opened):
    from axe_playwright_python.sync_playwright import Axe

    page, complaints = opened
    assert page.title() == "demo", "text from outside ran as a script"
    assert page.locator("[data-drawn=failed]").count() == 0
    assert page.locator("[data-drawn=yes]").count() == page.locator("[data-chart]").count()
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    check_chart_by_keyboard(page)
    check_table(page)
    check_theme(page)
    found = Axe().run(page, options=AXE_RULES)
    assert [(v["id"], v["nodes"][0]["html"][:150]) for v in found.response["violations"]] == []
    assert complaints == []


def check_chart_by_keyboard(page: Any) -> None:
    """Arrow keys go from trial to trial of a chart, and say which one; Enter opens it in the table."""
    chart = page.locator("#figure-history [data-chart], figure [data-chart]").first
    chart.scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('figure [data-chart]').dataset.keys === 'yes'")
    chart.focus()
    page.keyboard.press("ArrowRight")
    said = page.locator(".chart-point").first
    first = said.inner_text()
    page.keyboard.press("ArrowRight")
    second = said.inner_text()
    page.keyboard.press("ArrowLeft")
    assert first == said.inner_text() != second
    assert re.match(r"trial \d+ · .* \(1 of \d+; Enter opens it\)", first)
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    last = said.inner_text()
    count = re.search(r"\((\d+) of (\d+);", last)
    assert count[1] == count[2]
    page.keyboard.press("Enter")
    name = re.match(r"trial (\d+)", last)
    opened = page.locator(f'tr[data-trial="{name[1]}"] button.open').first
    assert opened.get_attribute("aria-expanded") == "true", last
    page.keyboard.press("Enter")  # its button has the focus now
    assert opened.get_attribute("aria-expanded") == "false"


def check_table(page: Any) -> None:
    """Sort and open by keyboard, filter by words, hide a column, save as CSV."""
    rows = page.locator("#trials-1 > tbody > tr:not(.detail):visible")
    assert rows.count() == 14
    heads = page.locator("#trials-1 > thead th").all_inner_texts()
    column = next(n for n, text in enumerate(heads) if text.startswith("step time"))
    page.locator("#trials-1 > thead button").nth(column).focus()
    page.keyboard.press("Enter")
    cells = f"r => r.cells[{column}].dataset.sort"
    script = "[...document.querySelectorAll('#trials-1 > tbody > tr:not(.detail)')].map(" + cells + ")"
    times = [float(value) for value in page.evaluate(script) if value]
    assert times == sorted(times)
    assert page.locator("#trials-1 > thead th").nth(column).get_attribute("aria-sort") == "ascending"
    first = page.locator("#trials-1 button.open").first
    first.focus()
    page.keyboard.press("Enter")
    detail = page.locator("#" + str(first.get_attribute("aria-controls")))
    assert detail.is_visible()
    assert detail.locator("a", has_text="stdout.log").get_attribute("href") == "./trials/0014/stdout.log"
    page.get_by_label("filter").fill("OUT_OF failed")
    assert rows.count() == 0
    page.get_by_label("filter").fill("failed")
    assert (rows.count(), page.locator(".count").first.inner_text()) == (2, "2 of 14 rows")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as CSV").click()
    lines = Path(saved.value.path()).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("trial,tp,")
    page.get_by_label("filter").fill("")
    page.locator(".menu summary").click()
    page.get_by_role("checkbox", name="kernel").uncheck()
    assert not page.locator("#trials-1 > thead th", has_text="kernel").is_visible()
    page.locator(".menu summary").click()


def check_theme(page: Any) -> None:
    """The switch changes page and charts."""
    color = "getComputedStyle(document.body).backgroundColor"
    before, chart = page.evaluate(color), page.locator("#figure-r1-slice svg")
    drawn = chart.evaluate("element => element.outerHTML")
    page.locator("#theme").click()
    assert {before, page.evaluate(color)} == {"rgb(255, 255, 255)", "rgb(18, 22, 28)"}
    page.wait_for_function("text => document.querySelector('#figure-r1-slice svg')?.outerHTML !== text", arg=drawn)
    page.locator("#figure-r1-slice select").select_option(index=1)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save this step for Perfetto").click()
    assert '"ph":"X"' in Path(saved.value.path()).read_text(encoding="utf-8")
