"""Cost of the Optuna study of a search: bookkeeping for each trial, and building the study anew.

`python benchmarks/study.py` searches a simulated recording (the formula of `soak.py`; only the engine is measured) and
prints, after 15, 200 and 2,000 trials, the median time of a trial for asking the study and for writing `study.log`, and
the time to build the study in memory and in the file from the ledger. The sampler is Optuna's RandomSampler, which
takes next to no time of its own. `--dashboard` does that with optuna-dashboard open on the study, which is asked for
all trials every second, `--screenshot PATH` keeps a picture of it at the end (needs Chromium), and `--kill N` kills the
search with SIGKILL after N trials and resumes it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from soak import generate_recording

from cclsearch.loop.loop import run_search, view_search
from cclsearch.loop.session import begin_or_resume, open_session
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.propose.base import Proposal, Proposer, SearchView
from cclsearch.propose.study.choose import make_sampler
from cclsearch.record.event import Event, TrialFinished, TrialProposed
from cclsearch.record.state import RunState
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import create_run, load_run
from cclsearch.run.spec import SearchLimits
from cclsearch.study.view import STUDY_FILE, StudyView

SAMPLER = "optuna.samplers:RandomSampler"
WINDOW = 100
"""The median is over this many trials, or as many as there are."""


class TimedAsker(Proposer):
    """A proposer that notes how long each proposal takes, in milliseconds."""

    def __init__(self, proposer: Proposer) -> None:
        self.name, self._proposer, self.asked_ms = proposer.name, proposer, []

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return the proposals of the timed proposer."""
        start_s = time.perf_counter()
        proposals = self._proposer.propose(view, count)
        self.asked_ms.append(1000 * (time.perf_counter() - start_s))
        return proposals


def search(run: Path, marks: Sequence[int], kill_at: int) -> None:
    """Run or continue the search in a folder, and print the figures of each mark; kill this process after `kill_at`."""
    written: dict[int, float] = {}
    watch = StudyView.watch

    def timed(self: StudyView, event: Event, state: RunState) -> None:
        start_s = time.perf_counter()
        watch(self, event, state)
        if isinstance(event, TrialProposed | TrialFinished):
            written[event.trial] = written.get(event.trial, 0.0) + 1000 * (time.perf_counter() - start_s)

    StudyView.watch = timed  # type: ignore[method-assign]
    session = open_session(run)
    asker = TimedAsker(session.proposer)
    session = replace(session, proposer=asker)

    def on_event(event: Event, state: RunState) -> None:
        if isinstance(event, TrialProposed) and event.trial - 1 in marks:
            last = [written[n] for n in sorted(written)[:-1][-WINDOW:]]
            report(event.trial - 1, asker.asked_ms[-WINDOW:], last)
        if isinstance(event, TrialFinished) and event.trial == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with RunWriter(run) as writer:
        begin_or_resume(writer, session)
        writer.watch(on_event)
        run_search(writer, session)


def report(trials: int, asked_ms: Sequence[float], written_ms: Sequence[float]) -> None:
    """Print the median bookkeeping of a trial."""
    asked, written = float(np.median(asked_ms)), float(np.median(written_ms))
    print(f"| {trials:,} | {asked:.2f} | {written:.2f} | {asked + written:.2f} |", flush=True)


def rebuild(run: Path) -> None:
    """Print how long it takes to build both studies from the ledger of a whole search."""
    session = open_session(run)
    with RunWriter(run) as writer:
        view = view_search(writer, session, budget_left=1)
        start_s = time.perf_counter()
        make_sampler(SAMPLER).propose(view, 1)
        in_memory_s = time.perf_counter() - start_s
        (run / STUDY_FILE).unlink()
        start_s = time.perf_counter()
        StudyView(run, session.spec, session.space.knobs, print).open(writer.state)
        in_file_s = time.perf_counter() - start_s
    trials = f"{len(view.observations):,} trials"
    print(f"built anew after {trials}: in memory {in_memory_s:.2f} s, study.log {in_file_s:.2f} s")


def poll(url: str, seen: list[int], stop: threading.Event) -> None:
    """Ask a dashboard for every trial of the last study, once a second."""
    while not stop.wait(1.0):
        studies = json.load(urllib.request.urlopen(f"{url}/api/studies", timeout=60))["study_summaries"]
        if studies:
            last = max(study["study_id"] for study in studies)
            answer = urllib.request.urlopen(f"{url}/api/studies/{last}?after=0", timeout=60)
            seen.append(len(json.load(answer)["trials"]))


def take_screenshot(url: str, path: Path) -> None:
    """Keep a picture of the last study's page as the dashboard shows it."""
    from playwright.sync_api import sync_playwright

    studies = json.load(urllib.request.urlopen(f"{url}/api/studies", timeout=60))["study_summaries"]
    last = max(study["study_id"] for study in studies)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{url}/dashboard/studies/{last}", timeout=180_000)
        page.wait_for_selector(".js-plotly-plot .main-svg", timeout=180_000)
        page.wait_for_timeout(5_000)
        page.screenshot(path=str(path))
        browser.close()


def main() -> None:
    """Parse the arguments, run the searches and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2001)
    parser.add_argument("--dashboard", action="store_true")
    parser.add_argument("--screenshot", type=Path)
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="the run to continue (for the script itself)")
    args = parser.parse_args()
    if args.folder is not None:
        search(args.folder, (15, 200, 2000), args.kill)
        return
    with tempfile.TemporaryDirectory(prefix="ccl-study-") as name:
        recording = generate_recording(Path(name, "simulated"), args.trials + args.trials // 10)
        limits = SearchLimits(budget=args.trials)
        request = SearchRequest("wl2", limits, recording=str(recording), sampler=SAMPLER, run_id="study")
        run = create_run(plan_search(request).spec, Path(name, "runs"))
        command, stop, seen = [sys.executable, __file__, "--folder", str(run)], threading.Event(), []
        print("| after trials | asking (ms) | writing study.log (ms) | bookkeeping of a trial (ms) |")
        print("| --- | --- | --- | --- |")
        server = None
        if args.dashboard:
            opened = [sys.executable, "-m", "cclsearch", "dashboard", str(run), "--port", "0"]
            server = subprocess.Popen(opened, stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            url = server.stdout.readline().split(": ", 1)[1].split()[0]
            poller = threading.Thread(target=poll, args=(url, seen, stop))
            poller.start()
        try:
            if args.kill:
                killed = subprocess.run([*command, "--kill", str(args.kill)], check=False)
                print(f"killed after {args.kill:,} trials (exit code {killed.returncode}); resumed:", flush=True)
            subprocess.run(command, check=True)
            time.sleep(2.5)
            if args.screenshot is not None and server is not None:
                take_screenshot(url, args.screenshot)
        finally:
            stop.set()
            if server is not None:
                poller.join()
                server.terminate()
                server.wait()
        if seen:
            print(f"the dashboard answered {len(seen)} times with all trials; the last time with {seen[-1]:,} trials")
        ran = load_run(run).state.trials
        print(f"the ledger has {len(ran):,} trials, of {len({t.config for t in ran.values()}):,} configurations")
        rebuild(run)


if __name__ == "__main__":
    main()
