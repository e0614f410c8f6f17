"""`ccl-search ui` in a real browser: live pages, filter, compare, keyboard, dark mode, narrow screens, axe-core."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_ui import EXAMPLE, HOSTILE, add_trials

from cclsearch.run.annotations import add_note

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@dataclass(frozen=True)
class Served:
    """A server over two runs that may add notes."""

    address: str
    """Without the token, with a slash at the end."""
    token: str
    runs: Path
    process: subprocess.Popen[str]

    def with_token(self, path: str) -> str:
        return f"{self.address}{path}#token={self.token}"


@contextmanager
def serve(project: Path) -> Iterator[Served]:
    """A server over copies of the example run; one has 205 trials and a note that is markup."""
    runs = project / "runs"
    (project / "ccl-search.yaml").write_text("{}\n")
    for name in ("one", "two"):
        shutil.copytree(EXAMPLE, runs / name)
    add_trials(runs / "two", range(6, 206))
    add_note(runs / "two", HOSTILE)
    command = [sys.executable, "-m", "cclsearch", "ui", "--port", "0", "--allow-notes"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=project)
    try:
        address, _, token = server.stdout.readline().split()[1].partition("#token=")
        yield Served(address, token, runs, server)
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("project")) as found:
        yield found


def open_page(browser: Browser, address: str, *, width: int = 1280, dark: bool = False) -> tuple[Page, list[str]]:
    """A page, and what went wrong in it: errors of scripts, refusals of the content policy, other requests."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    page.set_default_timeout(30_000)
    problems: list[str] = []
    origin = "/".join(address.split("/")[:3])
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda r: None if r.url.startswith((origin, "data:")) else problems.append(r.url))
    page.goto(address)
    return page, problems


def test_the_table_is_filtered_sorted_and_paged_by_keyboard_alone(browser, served):
    page, problems = open_page(browser, f"{served.address}runs/two")
    assert page.locator("#trials tbody tr").count() == 100
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('name')") == "q":
            break
    page.keyboard.type("dp=77")
    page.wait_for_function("() => document.querySelector('#trials .count').textContent.startsWith('1 of 205')")
    assert page.evaluate("document.activeElement.name") == "q"
    page.reload()
    assert page.locator("#trials tbody tr").count() == 1, "the address keeps the filter"
    page.locator("[name=q]").fill("")
    page.wait_for_function("() => document.querySelectorAll('#trials tbody tr').length === 100")
    page.locator("[id='sort-knob.dp']").focus()
    for order, first in (("descending", "205"), ("ascending", "1")):
        page.keyboard.press("Enter")
        page.wait_for_selector(f"th[aria-sort={order}] [id='sort-knob.dp']")
        assert page.locator("#trials tbody tr").first.locator("td").nth(4).inner_text() in (first, "2", "4")
        assert page.evaluate("document.activeElement.id") == "sort-knob.dp"
    page.locator("#next-page").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#trials .count').textContent.includes('page 2 of 3')")
    assert page.title().startswith("two"), "text from outside ran as a script"
    assert problems == []


def test_runs_are_searched_chosen_and_compared(browser, served):
    page, problems = open_page(browser, served.address)
    page.locator("[name=q]").fill("two")
    page.wait_for_function("() => document.querySelectorAll('#runs tbody tr').length === 1")
    page.locator("[name=q]").fill("")
    page.wait_for_function("() => document.querySelectorAll('#runs tbody tr').length === 2")
    for box in page.locator("#runs input[type=checkbox]").all():
        box.check()
    page.get_by_role("button", name="Compare the chosen runs").click()
    page.wait_for_selector("[data-chart][data-drawn=yes]")
    assert page.locator("[data-chart] svg").count() == 1
    page.locator("[name=a]").fill("one/1")
    page.locator("[name=b]").fill("two/5")
    page.get_by_role("button", name="Show the difference").click()
    page.wait_for_selector("tr.differs")
    assert "knob tp" in page.locator("tr.differs").all_inner_texts()[1]
    assert problems == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_every_page_is_accessible_and_fits_the_screen(browser, served, width, dark):
    from axe_playwright_python.sync_playwright import Axe

    base = served.address
    page, problems = open_page(browser, base, width=width, dark=dark)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(18, 22, 28)" if dark else "rgb(255, 255, 255)"
    )
    paths = ("", "runs/two", "runs/one/trials/5", "compare?run=one&run=two&a=one/1&b=two/2", "leaderboard", "nights")
    for path in paths:
        page.goto(base + path)
        if page.locator("[data-charts]").count():
            page.wait_for_selector("[data-chart][data-drawn=yes]")
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == [], path
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide == 0, f"{path} scrolls sideways"
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before, "the choice is kept"
    assert re.search("status", page.locator("#message").get_attribute("role") or "")
    assert problems == []


def test_a_live_run_is_updated_without_a_reload_until_it_is_deleted(browser, tmp_path):
    with serve(tmp_path) as served:
        check_live_pages(browser, served)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(timeout=30) == 0, "open pages do not keep the server from ending"


def check_live_pages(browser: Browser, served: Served) -> None:
    """Two pages of one run follow its ledger, each other's changes, and its end."""
    page, problems = open_page(browser, served.with_token("runs/one"))
    page.wait_for_selector("[data-chart][data-drawn=yes]")
    assert page.locator("#trials .count").inner_text() == "5 of 5 trials"
    page.evaluate("window.sameDocument = true")
    other, _ = open_page(browser, f"{served.address}runs/one")
    page.locator("#sort-value").focus()
    add_trials(served.runs / "one", range(6, 9))
    for each in (page, other):
        each.wait_for_function("() => document.querySelector('#trials .count').textContent.includes('8 of 8')")
    label = "document.querySelector('figure .summary').textContent"
    page.wait_for_function(f"() => {label}.includes('of 8 trials')")
    assert page.evaluate("window.sameDocument") is True
    assert page.evaluate("document.activeElement.id") == "sort-value", "the focus stays where it was"
    page.locator("form[data-change=tag] input[name=text]").fill("paper")
    page.keyboard.press("Enter")
    other.wait_for_function("() => document.querySelector('#people').textContent.includes('tags: paper')")
    assert problems == []
    shutil.rmtree(served.runs / "one")
    page.wait_for_function("() => document.getElementById('message').textContent.includes('was deleted')")
    assert page.locator("#trials tbody tr").count() == 8, "its last state stays"
