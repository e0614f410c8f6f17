"""Weight of a report's page, time to write it, and time until a browser has drawn its first chart.

    python benchmarks/report.py [--trials 15 200 2000] [--browser /usr/bin/chromium]

The trials are made up, from a fixed seed: five knobs, a tenth fails, each with a rationale and four admission rules.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from cclsearch.plugins import TASKS
from cclsearch.record.event import Purpose
from cclsearch.report.data import FAILED, RANKED, AdmissionCheck, RunPage, TrialRow
from cclsearch.report.page import render_page


def make_trial(number: int) -> TrialRow:
    config = {
        "tp": 2 ** random.randrange(4),
        "pp": 2 ** random.randrange(3),
        "zero_stage": random.randrange(3),
        "micro_batch_size": 2 ** random.randrange(4),
        "activation_checkpointing": random.choice(["none", "selective", "full"]),
    }
    time_s = None if random.random() < 0.1 else 5 / config["tp"] ** 0.5 + random.random()
    return TrialRow(
        number=number,
        config=config,
        proposer="surrogate",
        rationale="expected step time 4.2 s, success probability 88%, expected improvement 1.6% of the best so far",
        purpose=Purpose.SEARCH,
        state=RANKED if time_s else FAILED,
        reason="" if time_s else "CUDA out of memory: 512 MiB asked, 200 MiB free",
        loss=time_s,
        score=time_s,
        value=time_s,
        metrics={"step_time_s": time_s, "mfu": 0.3 * random.random(), "tokens_per_s": 1e5 / time_s} if time_s else {},
        expected={"step_time_s": (time_s or 5.0) * random.uniform(0.7, 1.4)},
        checks=tuple(AdmissionCheck(rule, True, "as the card says") for rule in ("work", "load", "warmup", "losses")),
        evidence=f"trials/{number:04d}",
    )


def make_page(count: int) -> RunPage:
    random.seed(count)
    trials = tuple(make_trial(number) for number in range(1, count + 1))
    best = min((t for t in trials if t.value), key=lambda t: t.value or 0.0)
    return RunPage(
        run_id=f"run-of-{count}", task=TASKS.get("training"), workload="made-up", card="made-up", title="made-up work",
        model="m", work="m, 1 x 1", hardware="8 x h100", framework="megatron", provenance="simulated",
        objective="step_time", constraints=(), score_label="step time (s)", greater_is_better=False, status="ended",
        banner=(), trials=trials, counts=f"{count} trials", best=best.number, baseline=1, facts=(),
    )  # fmt: skip


def measure(count: int, browser: str | None) -> str:
    page = make_page(count)
    render_page([page])  # bundles the script, once per process
    start = time.perf_counter()
    text = render_page([page])
    seconds = time.perf_counter() - start
    drawn = f" {time_browser(text, browser):.2f} s |" if browser else ""
    return f"| {count:,} | {len(text.encode()) / 1e3:,.0f} kB | {seconds:.2f} s |{drawn}"


def time_browser(text: str, browser: str) -> float:
    """Seconds from opening the file until a chart is drawn."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "report.html"
        path.write_text(text, encoding="utf-8")
        started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = started.new_page()
        start = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector("figure svg", timeout=60_000)
        seconds = time.perf_counter() - start
        started.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=[15, 200, 2000])
    parser.add_argument("--browser")
    args = parser.parse_args()
    print("| trials | page | written in |" + (" first chart after |" if args.browser else ""))
    print("| --- | --- | --- |" + (" --- |" if args.browser else ""))
    for count in args.trials:
        print(measure(count, args.browser), flush=True)


if __name__ == "__main__":
    main()
