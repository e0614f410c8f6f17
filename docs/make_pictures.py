"""Draws the pictures of README and docs from real runs: the first minute, the terminal, the report and the UI.

make screenshots               (python docs/make_pictures.py)
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from rich.console import Console

from cclsearch.charts.chart import Chart, Row, make_spec, quantity, render_svg
from cclsearch.core.text import plain
from cclsearch.core.values import Value
from cclsearch.recording.load import Recording, load_recording
from cclsearch.report.progress import ProgressObserver, render_progress
from cclsearch.report.summary import summarize_run
from cclsearch.run.folder import Run, load_run
from cclsearch.tasks.base import task_of

ROOT = Path(__file__).parent.parent
PICTURES = Path(__file__).parent / "pictures"
COMMAND = ["run", "--workload", "wl2", "--launcher", "replay", "--budget", "15", "--name", "wl2-demo", "--quiet"]
RECORDING = ROOT / "workloads" / "recordings" / "nanotron-8b-2n"
STEP = "step_time_s"
USUAL: Mapping[str, Value] = {"tp": 8, "pp": 1, "dp": 2, "zero_stage": 0, "micro_batch_size": 1}
"""The usual first choice: tensor parallel over the 8 accelerators of a node (takeaway 1 of Narayanan et al. 2021,
"Efficient large-scale language model training on GPU clusters using Megatron-LM"), data parallel over the nodes."""
USUAL_TUNED: Mapping[str, Value] = {**USUAL, "micro_batch_size": 8}
"""The same with the largest micro-batch that ran."""


FOUND, USUAL_KIND, TRIED, OTHER = "found", "usual default", "run by the search", "not run"


@dataclass(frozen=True)
class FirstMinute:
    """What the demo found, beside what one would have typed."""

    found_s: float
    usual_s: float
    tuned_s: float
    is_fastest: bool
    """Whether no row of the recording is faster than what was found."""
    trials: int
    rows: int
    steps: int
    """Of a trial."""
    gpu_hours: float
    """Of the steps of trials that ran to their end; what starts and failed trials cost is not recorded."""
    paid_back: int
    """Steps of the found configuration that save as much, against the usual one."""

    def sentences(self) -> list[str]:
        """Return what README says, with these figures."""
        gain = self.usual_s / self.found_s
        return [
            f"**{gain:.2f}x faster than the usual default** ({self.usual_s:.2f} s to {self.found_s:.2f} s a step)",
            f"{self.tuned_s / self.found_s:.2f}x faster than that default with the largest micro-batch that fits",
            f"the fastest of the {self.rows} recorded configurations" if self.is_fastest else "not the fastest",
            f"{self.trials} trials of {self.steps} steps, {self.gpu_hours:.1f} GPU-hours",
            f"paid back after {self.paid_back} steps",
        ]


def measure_first_minute(run: Run, recording: Recording) -> FirstMinute:
    """Compute the figures of the first minute from the run and the table that it was replayed from."""
    best, card = run.state.best, recording.card
    assert best is not None
    found = read_time(recording, best.config)
    times = [recording.look_up(trial.config) for trial in run.state.trials.values()]
    task = task_of(card)
    steps = task.count_units(task.make_input(card, best.config, is_measured=True, run_id="", trial=1))
    assert steps is not None
    usual = read_time(recording, USUAL)
    seconds = steps * sum(row.metrics[STEP] for row in times if row is not None and STEP in row.metrics)
    return FirstMinute(
        found_s=found, usual_s=usual, tuned_s=read_time(recording, USUAL_TUNED),
        is_fastest=found == recording.best_value, trials=len(run.state.trials), rows=len(recording.rows), steps=steps,
        gpu_hours=seconds * card.hardware.num_accelerators / 3600, paid_back=round(seconds / (usual - found)),
    )  # fmt: skip


def read_time(recording: Recording, config: Mapping[str, Value]) -> float:
    """Return the recorded step time of a configuration that ran."""
    row = recording.look_up(config)
    assert row is not None, f"{config} is not in the recording"
    return row.metrics[STEP]


def draw_first_minute(run: Run, recording: Recording) -> str:
    """Draw every recorded configuration by its step time: run by the search or not, the usual one, the found one."""
    figures = measure_first_minute(run, recording)
    tried = {recording.space.row(trial.config) for trial in run.state.trials.values()}
    values = sorted((value, row) for row, value in enumerate(recording.values) if value is not None)
    rows: list[Row] = [
        {"place": place, "v": value, "kind": TRIED if row in tried else OTHER}
        for place, (value, row) in enumerate(values, 1)
    ]
    named = []
    for seconds, kind, label in (
        (figures.found_s, FOUND, f"found: {figures.found_s:.2f} s"),
        (figures.tuned_s, USUAL_KIND, f"with the largest micro-batch that fits: {figures.tuned_s:.2f} s"),
        (
            figures.usual_s,
            USUAL_KIND,
            f"usual default: {figures.usual_s:.2f} s, {figures.usual_s / figures.found_s:.2f}x",
        ),
    ):
        place = next(n for n, (value, _) in enumerate(values, 1) if value == seconds)
        named.append({"place": place, "v": seconds, "kind": kind, "label": label})
    failed = len(recording.rows) - len(values)
    wanted = {"type": "linear", "domain": [-3, len(values) + 2], "nice": False}
    x: Row = {"field": "place", "type": "quantitative", "scale": wanted, "axis": {"grid": False, "tickMinStep": 10}}
    x["title"] = f"the {len(values)} configurations of the recording that ran, fastest first ({failed} more failed)"
    y = quantity("v", "step time (s, recorded)", [value for value, _ in values])
    y["scale"] = {"type": "log", "domain": [values[0][0] * 0.75, values[-1][0] * 1.1], "nice": False}
    colors = {FOUND: ("$green", "diamond"), USUAL_KIND: ("$orange", "square"), TRIED: ("$blue", "circle"),
              OTHER: ("$gray", "circle")}  # fmt: skip
    scale = {"domain": list(colors), "range": [color for color, _ in colors.values()]}
    shapes = {"domain": list(colors), "range": [shape for _, shape in colors.values()]}
    marks = {"x": x, "y": y, "color": {"field": "kind", "type": "nominal", "title": None, "scale": scale},
             "shape": {"field": "kind", "type": "nominal", "title": None, "scale": shapes}}  # fmt: skip
    small = {"condition": {"test": f"datum.kind === '{OTHER}'", "value": 26}, "value": 90}
    layers = [
        {"mark": {"type": "point", "filled": True, "opacity": 1}, "encoding": {**marks, "size": small}},
        {"data": {"values": named}, "encoding": marks,
         "mark": {"type": "point", "filled": True, "size": 230, "opacity": 1}},
        {"data": {"values": named}, "encoding": {"x": x, "y": y, "text": {"field": "label"}},
         "mark": {"type": "text", "align": "left", "dx": 2, "dy": 22, "fontSize": 14, "fontWeight": "bold"}},
    ]  # fmt: skip
    gain = f"{figures.usual_s / figures.found_s:.2f}x faster than the usual default"
    cost = f"{figures.gpu_hours:.1f} GPU-hours of steps, paid back after {figures.paid_back} steps"
    title = {"text": f"An 8B model on 16 H100: {gain}, in {figures.trials} trials", "subtitle": cost,
             "anchor": "start", "fontSize": 17, "subtitleFontSize": 14, "offset": 10}  # fmt: skip
    return render_svg(Chart("first-minute", "", "", make_spec(rows, 330, layer=layers, title=title)))


def draw_terminal(run: Run) -> str:
    """Draw the table of the search and its summary, as the terminal shows them."""
    console = Console(record=True, width=132, file=io.StringIO())
    console.print("$ ccl-search run --workload wl2 --budget 15", style="bold")
    for line in run.spec.banner:
        console.print(f"note: {plain(line)}", style="dim", highlight=False)
    knobs = ("tp", "pp", "dp", "zero_stage", "micro_batch_size")
    progress = ProgressObserver(run.spec, run.folder).observe(run.state, knobs, is_running=False)
    console.print(render_progress(progress, console.width, None, run.state.last_s))
    for line in summarize_run(run.spec, run.state, Path("runs") / "wl2-demo"):
        console.print(plain(line), highlight=False)
    drawn = console.export_svg(title="ccl-search", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # it would load a font from another host


@contextmanager
def open_browser() -> Iterator[Any]:
    """Start Chromium, which the tests of the report use too."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        raise SystemExit("the pictures of the report and the UI need Chromium: apt install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        yield started
        started.close()


def shoot(
    browser: Any, address: str, name: str, *, width: int, height: int, dark: bool = False, at: str = "h1"
) -> None:
    """Write a picture of a page, from the element that `at` selects on."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(address)
    page.wait_for_load_state("load")
    page.evaluate("at => document.querySelector(at).scrollIntoView({block: 'start'})", at)
    page.wait_for_timeout(1500)  # charts are drawn when they come into sight
    page.screenshot(path=str(PICTURES / name))
    context.close()


def shoot_pages(folder: Path) -> None:
    """Write pictures of the report and of the UI over the runs of a project folder."""
    report = [sys.executable, "-m", "cclsearch", "report", "wl2-demo", "--no-png"]
    subprocess.run(report, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    page = (folder / "runs" / "wl2-demo" / "report.html").as_uri()
    serve = [sys.executable, "-m", "cclsearch", "ui", "--port", "0"]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1].partition("#")[0]
        with open_browser() as browser:
            shoot(browser, page, "report-light.png", width=1180, height=900)
            shoot(browser, page, "report-dark.png", width=1180, height=900, dark=True, at="[data-chart]")
            shoot(browser, page, "report-400px.png", width=400, height=900)
            shoot(browser, address, "ui-runs.png", width=1180, height=320)
            shoot(browser, f"{address}runs/wl2-demo", "ui-run-dark.png", width=1180, height=900, dark=True)
    finally:
        server.kill()
        server.wait()


def search(folder: Path) -> Run:
    """Run the demo in a project folder of its own, and the same with random search for the list of runs."""
    for command in (COMMAND, [*COMMAND[:-3], "--name", "random", "--sampler", "random", "--quiet"]):
        command = [sys.executable, "-m", "cclsearch", *command]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return load_run(folder / "runs" / "wl2-demo")


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "ccl-search.yaml").write_text("{}\n", encoding="utf-8")
        run = search(folder)
        (PICTURES / "first-minute.svg").write_text(draw_first_minute(run, load_recording(RECORDING)), encoding="utf-8")
        (PICTURES / "run.svg").write_text(draw_terminal(run), encoding="utf-8")
        print("\n".join(measure_first_minute(run, load_recording(RECORDING)).sentences()))
        shoot_pages(folder)


if __name__ == "__main__":
    main()
