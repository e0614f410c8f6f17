"""Reports: their content, escaping of text from outside, and behavior in a real browser."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded_runs import search, write_recording
from report_pages import HOSTILE, make_page, make_trial

from cclsearch.analysis.report_pages import build_page, neighbor_rows
from cclsearch.cli import main
from cclsearch.draw.axes import Scale, fit_scale, make_ticks, show_number
from cclsearch.draw.png import write_png
from cclsearch.draw.scene import PALETTE, Mark, Rect, Scene, Text
from cclsearch.draw.svg import render_svg
from cclsearch.plugins import TASKS
from cclsearch.record.event import RetryKind, TrialRetried
from cclsearch.record.state import RunState
from cclsearch.report.charts import draw_causes, draw_prediction, draw_progress, draw_sensitivity
from cclsearch.report.compare import compare_frameworks, draw_against, draw_bests, rank_runs
from cclsearch.report.gather import describe_change
from cclsearch.report.objective_figure import ObjectiveFigure
from cclsearch.report.page import dump_for_script, render_page
from cclsearch.report.terminal import describe_event
from cclsearch.search.session import rebuild_space


class Elements(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_loads_nothing_and_allows_no_foreign_script() -> None:
    page = render_page([make_page()])
    elements = Elements(page)
    assert len(elements.of("script")) == 2
    assert elements.of("img") == elements.of("link") == elements.of("iframe") == []
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    policy = next(m["content"] for m in elements.of("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_text_from_outside_stays_text() -> None:
    page = render_page([make_page(), make_page("other" + HOSTILE)])
    assert HOSTILE not in page
    assert 'onerror="document' not in page
    elements = Elements(page)
    assert len(elements.of("script")) == 2
    assert all(not name.startswith("on") for _, attributes in elements.tags for name in attributes)


def test_the_data_in_the_page_is_json_that_cannot_end_its_element() -> None:
    text = dump_for_script({"why": HOSTILE + "\u2028"})
    assert "<" not in text
    assert json.loads(text) == {"why": HOSTILE + "\u2028"}
    with pytest.raises(ValueError, match="JSON"):
        dump_for_script({"loss": float("nan")})


def test_figures_that_were_not_measured_are_marked_in_page_and_charts() -> None:
    page = make_page(provenance="recorded")
    assert 'class="badge recorded"' in render_page([page])
    scene = draw_progress(page)
    assert scene is not None
    assert any("(recorded)" in item.text for item in scene.items if isinstance(item, Text))


def test_the_progress_chart_shows_every_trial_its_configuration_and_its_failure() -> None:
    scene = draw_progress(make_page())
    assert scene is not None
    marks = [item for item in scene.items if isinstance(item, Mark) and item.tip]
    assert [m.shape for m in marks] == ["circle", "cross", "circle", "circle", "triangle", "star", "diamond"]
    assert "out_of_memory" in marks[1].tip
    # kernel never varies, so it has no row of its own; every other knob has a cell a trial
    cells = [item for item in scene.items if isinstance(item, Rect)]
    assert len(cells) == 3 * 7
    assert "5 of 7 trials admitted (1 failed, 1 not admitted)" in scene.summary


def test_charts_without_data_are_left_out_and_not_drawn_empty() -> None:
    empty = make_page(trials=(make_trial(1, None),), best=None, baseline=None, neighbors=())
    assert [draw(empty) for draw in (draw_progress, draw_causes, draw_sensitivity, draw_prediction)] == [None] * 4
    assert "no such" not in render_page([empty])


def test_the_causes_chart_compares_best_and_baseline() -> None:
    scene = draw_causes(make_page())
    assert scene is not None
    bars = [item for item in scene.items if isinstance(item, Rect)]
    assert len(bars) == 6
    assert "best: compute 0.6 s" in scene.summary
    assert "baseline: compute 0.6 s" in scene.summary


def test_a_ranking_compares_only_equal_work_hardware_and_provenance() -> None:
    pages = [
        make_page("a", framework="megatron"),
        make_page("b", framework="torchtitan", trials=(make_trial(1, 0.4),), best=1),
        make_page("c", hardware="16 x h100", trials=(make_trial(1, 0.1),), best=1),
        make_page("d", provenance="recorded", trials=(make_trial(1, 0.01),), best=1),
    ]
    ranks = {entry.page.run_id: (entry.rank, entry.ratio) for entry in rank_runs(pages)}
    assert ranks == {"b": (1, 1.0), "a": (2, pytest.approx(1.25)), "c": (1, 1.0), "d": (1, 1.0)}
    lines = compare_frameworks(pages)
    assert len(lines) == 1
    assert "the best of torchtitan is 1.25x faster than the best of megatron (0.5 s -> 0.4 s)" in lines[0]
    scene = draw_bests(pages)
    assert scene is not None
    assert len([item for item in scene.items if isinstance(item, Rect)]) == 4


def test_a_metric_is_plotted_against_step_time_with_its_correlation() -> None:
    scene = draw_against([make_page()], "mfu")
    assert scene is not None
    assert "rank correlation of MFU with step time -1.00" in scene.summary
    assert draw_against([make_page()], "absent") is None


def test_every_chart_has_a_title_and_a_text_alternative() -> None:
    svgs = re.findall(r"<svg.*?</svg>", render_page([make_page()]), flags=re.S)
    assert len(svgs) >= 5
    for svg in svgs:
        assert 'role="img"' in svg
        assert re.search(r"<title id=[^>]+>[^<]+</title><desc id=[^>]+>[^<]+</desc>", svg)


def test_ids_are_unique_over_several_runs() -> None:
    elements = Elements(render_page([make_page("a"), make_page("b")]))
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def luminance(color: str) -> float:
    parts = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("role", ["ink", "muted", "blue", "orange", "green", "purple", "yellow"])
def test_text_and_series_contrast_with_light_and_dark_backgrounds(role: str, mode: int) -> None:
    lights = sorted((luminance(PALETTE[role][mode]), luminance(PALETTE["paper"][mode])))
    needed = 4.5 if role in ("ink", "muted") else 3.0
    assert (lights[1] + 0.05) / (lights[0] + 0.05) >= needed


def test_scales_contain_their_values_and_ticks_are_round() -> None:
    scale = fit_scale([0.013, 4.2], 0, 100)
    assert scale.log
    assert all(scale.low <= tick <= scale.high for tick in make_ticks(scale))
    assert make_ticks(Scale(0, 10, 0, 100)) == [0, 2, 4, 6, 8, 10]
    assert fit_scale([], 0, 1).high > fit_scale([], 0, 1).low
    assert fit_scale([3.0, 3.0], 0, 100)(3.0) == pytest.approx(50)
    shown = [show_number(v) for v in (0, 0.01234, 12.345, 123456.7, 1.5e9)]
    assert shown == ["0", "0.0123", "12.3", "123,457", "1.5e+09"]


def test_a_scene_becomes_svg_and_png_of_its_size(tmp_path: Path) -> None:
    from PIL import Image

    items = (Text(10, 20, "a < b & c"), Text(10, 60, "up", upright=True), Mark(40, 40, "star"), Rect(0, 0, 5, 5))
    scene = Scene("s", "A < title", "what it shows", 120, 80, items)
    svg = render_svg(scene, standalone=True)
    assert "a &lt; b &amp; c" in svg
    write_png(scene, tmp_path / "s.png", scale=1.5)
    with Image.open(tmp_path / "s.png") as image:
        assert image.size == (180, 120)
        assert len(set(image.convert("L").getdata())) > 20


def test_the_command_writes_a_page_and_pictures_for_one_run_and_for_all(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = write_recording(project / "toy")
    search(toy, "a", budget=5)
    search(toy, "b", "--sampler", "grid", budget=5)
    assert main(["report", "a"]) == 0
    assert Path("runs/a/report.html").is_file()
    assert Path("runs/a/charts/progress.png").is_file()
    assert main(["report", "--all", "--out", "all.html", "--no-png"]) == 0
    page = Path("all.html").read_text(encoding="utf-8")
    assert "2 runs compared" in page
    assert "<script>alert('card')" not in page
    capsys.readouterr()
    assert main(["report", "nowhere"]) == 2
    assert "there is no run 'nowhere'" in capsys.readouterr().err


def test_untried_neighbors_of_the_winner_have_a_predicted_step_time(project: Path) -> None:
    run = search(write_recording(project / "toy"), "a", budget=3)
    best = run.state.best
    assert best is not None
    space = rebuild_space(run.spec)
    tried = {space.row(trial.config) for trial in run.state.trials.values()}
    steps = [space.config(row) for row in neighbor_rows(space, best.config) if row is not None and row not in tried]
    changes = {describe_change(best.config, config) for config in steps}
    untried = [neighbor for neighbor in build_page(run).neighbors if neighbor.trial is None]
    assert changes
    assert {neighbor.change for neighbor in untried} <= changes
    assert all(neighbor.ratio > 0 for neighbor in untried)
    whole = search(write_recording(project / "again"), "b", budget=9)
    assert all(neighbor.trial is not None for neighbor in build_page(whole).neighbors)


def test_a_retried_trial_is_announced_with_the_reason_and_the_next_attempt() -> None:
    step_time = ObjectiveFigure(TASKS.get("training").primary_metric)
    event = TrialRetried(time_s=0.0, trial=3, attempt=1, kind=RetryKind.FAILURE, reason="preempted: node n1")
    assert describe_event(event, RunState(), 5, step_time) == "trial   3  retrying (preempted: node n1), attempt 2"
    stopped = TrialRetried(time_s=0.0, trial=3, attempt=1, kind=RetryKind.CANCELLED, reason="stopped")
    assert describe_event(stopped, RunState(), 5, step_time) == "trial   3  cancelled; it runs again on resume"


def test_a_run_without_a_finished_trial_has_a_report(project: Path) -> None:
    run = search(write_recording(project / "toy"), "a", budget=1)
    first = (run.folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    (run.folder / "ledger.jsonl").write_text("\n".join(first) + "\n", encoding="utf-8")
    assert main(["report", "a"]) == 0
    assert "no trial was admitted" in Path("runs/a/report.html").read_text(encoding="utf-8")


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
PROBE = """
<script>
addEventListener("load", () => {
  const table = document.querySelector("table.sortable"), rows = () => [...table.tBodies[0].rows];
  const heads = [...table.tHead.rows[0].cells];
  const column = heads.findIndex((head) => head.textContent.trim().startsWith("step time"));
  const times = () => rows().map((row) => row.cells[column].dataset.sort).filter((x) => x).map(Number);
  heads[column].querySelector("button").focus();
  const focused = document.activeElement === heads[column].querySelector("button");
  heads[column].querySelector("button").click();
  const up = times(), sort = heads[column].getAttribute("aria-sort");
  heads[column].querySelector("button").click();
  const down = times();
  const select = document.querySelector("[data-filters] select");
  select.value = "failed";
  select.dispatchEvent(new Event("change"));
  const out = {
    up, sort, down, focused, shown: rows().filter((row) => !row.hidden).length, title: document.title,
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    paper: getComputedStyle(document.body).backgroundColor, charts: document.querySelectorAll("svg").length,
    count: document.querySelector(".count").textContent,
  };
  const note = document.createElement("pre");
  note.id = "probe";
  note.textContent = JSON.stringify(out);
  document.body.append(note);
});
</script>
"""


def browse(page: str, folder: Path, *, width: int, dark: bool = False) -> dict[str, object]:
    """Values that the probe read in the page, opened from disk in a real browser."""
    path = folder / "page.html"
    open_policy = re.sub(r"script-src 'sha256-[^']+'", "script-src 'unsafe-inline'", page)
    path.write_text(open_policy.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    assert BROWSER is not None
    shown = ""
    for attempt in range(3):
        profile = folder / f"profile-{attempt}"
        command = [BROWSER, *FLAGS, *scheme, f"--user-data-dir={profile}", f"--window-size={width},900"]
        shown = dump_page([*command, "--virtual-time-budget=2000", "--dump-dom", path.as_uri()])
        found = re.search(r'<pre id="probe">(.*?)</pre>', shown, flags=re.S)
        if found:
            values: dict[str, object] = json.loads(html.unescape(found.group(1)))
            return values
    raise AssertionError(f"the page left no probe in three tries: {shown[-500:]!r}")


def dump_page(command: list[str]) -> str:
    """Output of the browser; empty if it hung, as it may on a busy machine."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False).stdout
    except subprocess.TimeoutExpired:
        return ""


@pytest.mark.serial
@pytest.mark.skipif(
    BROWSER is None and not os.environ.get("CCL_REQUIRE_CHROMIUM"), reason="chromium is not installed on this machine"
)
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (500, True)])
def test_the_page_works_in_a_real_browser(tmp_path: Path, width: int, dark: bool) -> None:
    assert BROWSER is not None, "CCL_REQUIRE_CHROMIUM is set, but chromium is not installed"
    seen = browse(render_page([make_page()]), tmp_path, width=width, dark=dark)
    assert seen["up"] == sorted(seen["up"])  # type: ignore[type-var, arg-type]
    assert seen["down"] == sorted(seen["up"], reverse=True)  # type: ignore[type-var, arg-type]
    assert seen["sort"] == "ascending"
    assert seen["focused"] is True
    assert (seen["shown"], seen["count"]) == (1, "1 of 7 rows")
    assert seen["title"] == "demo", "text from outside ran as a script"
    assert seen["wide"] == 0, "the page itself scrolls sideways"
    assert seen["paper"] == ("rgb(18, 22, 28)" if dark else "rgb(255, 255, 255)")
    assert seen["charts"] >= 5  # type: ignore[operator]
