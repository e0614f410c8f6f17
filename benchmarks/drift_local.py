"""A search over `tiny` that really trains on this machine, while others take a share of its cores from half-way on.

The best configuration is repeated every half of the budget (`--control-every`), so the second half has a control. The
burners take `--share` of each core, which is less than what the admission rule `load` refuses, and are ended by their
ids. With `--share 0` nothing changes, and "no difference" is the right answer.

    python benchmarks/drift_local.py --share 0.15 --runs FOLDER

On a shared machine begin with `chrt --rr 1`, so that only the burners come before the trials.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cclsearch.record.event import Purpose, TrialFinished
from cclsearch.record.ledger import LEDGER_FILE, read_events
from cclsearch.report.summary import describe_drift
from cclsearch.run.folder import load_run

BURN = """
import time
while True:
    while time.time() % {period} < {busy}:
        pass
    time.sleep({period} - time.time() % {period})
"""
PERIOD_S = 0.02
"""Of the burners: well below a step, so that every step is slowed alike. All cores are busy at the same time, so that
no rank can move to a free one."""
KNOBS = ("dp=1", "tp=1", "pp=1", "zero_stage=0")
"""One rank, so that the other cores may be busy."""


@contextlib.contextmanager
def burn(share: float) -> Iterator[None]:
    """Keep a share of each core busy, before processes of ordinary priority."""
    code = BURN.format(busy=share * PERIOD_S, period=PERIOD_S)
    burners = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count() or 1)] if share else []
    try:
        with contextlib.suppress(PermissionError):
            for burner in burners:
                os.sched_setscheduler(burner.pid, os.SCHED_FIFO, os.sched_param(2))
        yield
    finally:
        for burner in burners:
            burner.send_signal(signal.SIGKILL)
            burner.wait()


def count_finished(folder: Path) -> int:
    """Finished trials of a run that may not have begun yet."""
    ledger = folder / LEDGER_FILE
    return sum(isinstance(event, TrialFinished) for event in read_events(ledger)) if ledger.is_file() else 0


def search(runs: Path, name: str, *, budget: int, share: float) -> Path:
    """Run the search, with burners from half of its budget on; return its folder."""
    half, folder = budget // 2, runs / name
    command = [sys.executable, "-m", "cclsearch", "run", "-w", "tiny", "-b", str(budget), "--runs", str(runs)]
    command += ["--name", name, "--control-every", str(half), "--quiet"]
    command += [word for knob in KNOBS for word in ("--knob", knob)]
    with contextlib.ExitStack() as stack:
        running = subprocess.Popen(command)
        while running.poll() is None and count_finished(folder) < half:
            time.sleep(0.2)
        stack.enter_context(burn(share))
        running.wait()
    return folder


def describe(folder: Path) -> list[str]:
    """A table of the trials, and what the search says about the windows."""
    state = load_run(folder).state
    lines = ["| trial | purpose | configuration | step time | compared as |", "| --- | --- | --- | --- | --- |"]
    for trial in state.trials.values():
        measured = trial.outcome.metrics.get("step_time_s") if trial.outcome else None
        step = "none" if measured is None else f"{measured:.4f} s"
        corrected = state.corrected_loss(trial.number) if trial.loss is not None else None
        compared = "not admitted" if corrected is None else f"{corrected:.4f} s"
        lines.append(f"| {trial.number} | {trial.purpose.value} | {trial.config} | {step} | {compared} |")
    pairs = sum(trial.purpose is Purpose.CONTROL and trial.loss is not None for trial in state.trials.values())
    return [*lines, "", f"admitted controls: {pairs}", *describe_drift(state)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.15, help="of each core, from half of the budget on")
    args = parser.parse_args()
    name = f"drift-{args.share:g}-{int(time.time())}"
    folder = search(args.runs, name, budget=args.budget, share=args.share)
    print(f"measured on this machine: `tiny`, budget {args.budget}, burners take {args.share:.0%} of each core")
    print("\n".join(describe(folder)))


if __name__ == "__main__":
    main()
