"""Times `ccl-search ui` in a real browser on a run of many trials: first row, filter, sort, live update, memory.

    python benchmarks/ui.py --out benchmarks/ui.md

The run is made of copies of the trials of `runs/example-wl2`, with other numbers and figures: only times and memory are
measured, and its results mean nothing. Needs Chromium and `pip install playwright`.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "runs" / "example-wl2"
GOALS = {"first row": "< 1 s", "filter": "< 200 ms", "sort": "< 200 ms", "memory of the server": "< 500 MB"}


def make_run(folder: Path, num_trials: int) -> None:
    """Write a run of copies of the example's trials; figures are random numbers."""
    from cclsearch.record.event import SearchStarted, TrialFinished, TrialProposed, encode_line
    from cclsearch.record.ledger import LEDGER_FILE, read_events
    from cclsearch.run.spec import SPEC_FILE

    folder.mkdir(parents=True)
    shutil.copy(EXAMPLE / SPEC_FILE, folder / SPEC_FILE)
    events = list(read_events(EXAMPLE / LEDGER_FILE))
    drawn = random.Random(0)
    trials = [[e for e in events if getattr(e, "trial", None) == number] for number in (1, 2, 3, 5)]
    with (folder / LEDGER_FILE).open("wb") as file:
        file.write(encode_line(next(event for event in events if isinstance(event, SearchStarted))))
        for number in range(1, num_trials + 1):
            for event in trials[number % len(trials)]:
                update: dict[str, object] = {"trial": number}
                if isinstance(event, TrialProposed):
                    update["config"] = type(event.config)({**event.config, "micro_batch_size": number % 64})
                if isinstance(event, TrialFinished) and event.outcome.loss is not None:
                    value = 9 + 30 * drawn.random()
                    metrics = {**event.outcome.metrics, "step_time_s": value}
                    update["outcome"] = event.outcome.model_copy(update={"loss": value, "metrics": metrics})
                file.write(encode_line(event.model_copy(update=update)))


def read_rss_mb(pid: int) -> float:
    """Resident memory of a process, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) / 1000  # type: ignore[index]


def measure(runs: Path, num_trials: int) -> dict[str, str]:
    """The figures, in words."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "cclsearch", "ui", "--port", "0", "--runs", str(runs)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+/", server.stdout.readline())[0]  # type: ignore[index]
        with sync_playwright() as player:
            chromium = shutil.which("chromium") or shutil.which("chromium-browser")
            browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(f"{address}nights")
            began_s = time.perf_counter()
            page.goto(f"{address}runs/big", wait_until="commit")
            page.wait_for_selector("#trials tbody tr")
            first_s = time.perf_counter() - began_s
            total = f"of {num_trials} trials"
            page.wait_for_function("t => document.querySelector('#trials .count').textContent.includes(t)", arg=total)
            page.wait_for_function("() => !document.querySelector('[data-more]')")
            whole_s = time.perf_counter() - began_s
            page.wait_for_timeout(1500)
            type_in = "const f = document.querySelector('form[data-filter] [name=q]');"
            type_in += "f.value = '{}'; f.dispatchEvent(new Event('input', {{bubbles: true}}))"
            words = ("micro_batch_size=7", "tp=2", "surrogate", "1234", "micro_batch_size=63 recorded", "")
            page.context.set_default_timeout(60000)
            filters = [_act(page, type_in.format(word)) for word in words]
            heads = ("sort-value", "sort-knob.micro_batch_size", "sort-trial", "sort-value", "sort-value")
            sorts = [_act(page, f"document.getElementById('{head}').click()") for head in heads]
            heap_mb = page.evaluate("performance.memory.usedJSHeapSize") / 1e6
            nodes = page.evaluate("document.querySelectorAll('*').length")
            live_ms = _append(page, runs / "big", num_trials)
            rss_mb = read_rss_mb(server.pid)
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=30)
    return {
        "first row": f"{first_s:.2f} s",
        "whole ledger read": f"{whole_s:.1f} s",
        "filter": f"{statistics.median(filters):.0f} ms (slowest of {len(filters)}: {max(filters):.0f} ms)",
        "sort": f"{statistics.median(sorts):.0f} ms (slowest of {len(sorts)}: {max(sorts):.0f} ms)",
        "a new trial is shown after": f"{live_ms:.0f} ms",
        "memory of the server": f"{rss_mb:.0f} MB",
        "memory of the page": f"{heap_mb:.0f} MB of script, {nodes} elements",
    }


def _act(page: object, action: str) -> float:
    """Milliseconds from an action in the page until its table has changed."""
    script = """([act]) => new Promise((done) => {
      const table = document.querySelector("#trials"), began = performance.now();
      new MutationObserver((_, seen) => { seen.disconnect(); done(performance.now() - began); })
        .observe(table, { childList: true });
      %s
    })"""
    return float(page.evaluate(script % action, [""]))  # type: ignore[attr-defined]


def _append(page: object, folder: Path, num_trials: int) -> float:
    """Milliseconds from the moment a trial was written until the page counts it."""
    from cclsearch.record.event import encode_line
    from cclsearch.record.ledger import LEDGER_FILE, read_events

    last = [event for event in read_events(EXAMPLE / LEDGER_FILE) if getattr(event, "trial", None) == 1]
    with (folder / LEDGER_FILE).open("ab") as file:
        for event in last:
            file.write(encode_line(event.model_copy(update={"trial": num_trials + 1})))
    began_s = time.perf_counter()
    text = f"of {num_trials + 1} trials"
    page.wait_for_function(  # type: ignore[attr-defined]
        "t => document.querySelector('#trials .count').textContent.includes(t)", arg=text, polling=5
    )
    return 1000 * (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ccl-ui-") as scratch:
        runs = Path(scratch) / "runs"
        make_run(runs / "big", args.trials)
        size_mb = (runs / "big" / "ledger.jsonl").stat().st_size / 1e6
        found = measure(runs, args.trials)
    lines = [
        "# The web application on a long run",
        "",
        f"`python benchmarks/ui.py --trials {args.trials}`: a run of {args.trials:,} trials ({size_mb:.0f} MB of"
        " ledger),"
        " made of copies of the trials of `runs/example-wl2` with random figures; Chromium without a window, and a"
        " server that was just started, on the same two cores. Filter and sort: from the key or click until the"
        " table has changed, the wait for further keys (60 ms) included.",
        "",
        "| what | measured | goal |",
        "| --- | --- | --- |",
        *(f"| {name} | {value} | {GOALS.get(name, '')} |" for name, value in found.items()),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
