"""Searches that run real jobs on this machine, disturbed meanwhile: a wall clock that steps, a second PID namespace.

Used by `reliability.py`. A trial sleeps for a second at most and reports a simulated step time: what is tested is
whether its end is judged right, and whether its job is left alone by those that it does not belong to.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.processes import find_processes_by_variable, terminate_processes
from cclsearch.core.trust import trust_project
from cclsearch.record.event import RetryKind, TrialFinished, TrialProposed, TrialRetried
from cclsearch.record.ledger import LEDGER_FILE, read_events

BUDGET = 10
STEP_S = 172_800.0
"""Largest step of the wall clock, in both directions: two days."""
WAIT_S = 120.0
NEW_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]

CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset_s(void) {
    double value = 0;
    int file = syscall(SYS_openat, AT_FDCWD, CLOCK_FILE, O_RDONLY | O_CLOEXEC, 0);
    if (file < 0) return 0;
    if (syscall(SYS_read, file, &value, sizeof value) != sizeof value) value = 0;
    syscall(SYS_close, file);
    return (long)value;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""

SCRIPT = """
import json, os, time
trial = json.load(open(os.environ["CCL_CONFIG"]))
time.sleep(float(os.environ["LIVE_SECONDS"]))
result = {
    "status": "ok", "simulated": True, "world_size": trial["num_ranks"], "seq_len": trial["seq_len"],
    "global_batch_size": trial["global_batch_size"], "warmup_steps": trial["warmup_steps"],
    "step_times_s": [0.1 * trial["config"]["pp"]] * trial["timed_steps"],
}
path = os.path.join(os.environ["CCL_TRIAL_DIR"], "result.json")
with open(path + ".part", "w") as file:
    json.dump(result, file)
os.replace(path + ".part", path)
"""
FRAMEWORK = """
script: live.py
runner: process
knobs:
  - {name: tp, choices: [1, 2, 4]}
  - {name: dp, choices: [1, 2, 4]}
  - {name: pp, choices: [1, 2]}
  - {name: micro_batch_size, choices: [1, 2]}
"""
PROFILE = """
launcher: local
framework: live
poll_interval_s: 0.02
environment: {LD_PRELOAD: "%s", LIVE_SECONDS: "%s"}
"""


class LiveTally:
    """Counts over all disturbances of searches that run jobs."""

    def __init__(self) -> None:
        self.moments = 0
        self.searches = 0
        self.finished = 0
        self.wrong = 0
        """Trials that ended in anything but their result: a time limit that was not over, a job taken for dead."""
        self.lost = 0
        self.run_twice = 0
        self.rivals = 0
        """Commands in a second PID namespace that tried to resume or clean a living search."""
        self.rivals_admitted = 0
        self.unreadable = 0
        self.tracebacks = 0
        self.left_running = 0
        """Processes of jobs that were still there at the end."""


class LiveSearch:
    """Successive searches with real jobs in one project."""

    def __init__(self, folder: Path, tally: LiveTally, rng: random.Random, *, trial_s: float) -> None:
        self.folder, self.tally, self.rng = folder, tally, rng
        self.clock, self.library = folder / "clock", folder / "libstep.so"
        self.number, self.kept = 0, dict[int, TrialFinished]()
        self.step_clock(0.0)
        source = folder / "step.c"
        source.write_text(CLOCK)
        defined = f'-DCLOCK_FILE="{self.clock}"'
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", defined, "-o", self.library, source], check=True)
        (folder / "launchers").mkdir()
        for name, text in (("live.py", SCRIPT), ("live.framework.yaml", FRAMEWORK)):
            (folder / "launchers" / name).write_text(text)
        (folder / "launchers" / "here.yaml").write_text(PROFILE % (self.library, trial_s))
        trust_project(folder)
        self.begin()

    @property
    def run(self) -> Path:
        return self.folder / "runs" / f"live{self.number}"

    def begin(self) -> None:
        """Begin a new run."""
        self.number, self.kept = self.number + 1, {}
        self.tally.searches += 1

    def step_clock(self, by_s: float) -> None:
        """Set the wall clock of the search and its jobs."""
        self.clock.write_bytes(struct.pack("d", by_s))

    def start(self, *prefix: str) -> subprocess.Popen[bytes]:
        """Start or resume the search in a process of its own."""
        words = ["resume", self.run.name, "--quiet"]
        if not (self.run / "search.yaml").exists():
            # its jobs sleep and train nothing, so every trial is refused: the search must not end for that
            words = ["run", "-w", "tiny", "-l", "here", "-b", str(BUDGET), "--timeout-min", "1", "--keep-going"]
            words += ["--quiet"]
            words += ["--name", self.run.name, "--seed", str(self.number)]
        return self.call(*words, prefix=prefix)

    def call(self, *words: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start a command of ccl-search."""
        environment = {**os.environ, "LD_PRELOAD": str(self.library)}
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [*prefix, sys.executable, "-m", "cclsearch", *words],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait(self, process: subprocess.Popen[bytes], *expected: int) -> None:
        """Wait for the process; any code but the expected ones counts as a traceback."""
        try:
            code = process.wait(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code not in expected:
            self.tally.tracebacks += 1
            print(f"exit code {code}: {(self.folder / 'log.txt').read_text()[-3000:]}", file=sys.stderr)

    def await_moment(self, process: subprocess.Popen[bytes], *, steps: bool) -> None:
        """Return after some progress at a random moment, or at the end; the clock steps meanwhile."""
        ledger = self.run / LEDGER_FILE
        target = (ledger.stat().st_size if ledger.exists() else 0) + self.rng.randint(1, 8_000)
        deadline = time.monotonic() + WAIT_S
        while process.poll() is None and time.monotonic() < deadline:
            if ledger.exists() and ledger.stat().st_size >= target:
                break
            if steps:
                self.step_clock(self.rng.choice((-STEP_S, -3_600.0, 0.0, 3_600.0, STEP_S)))
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 0.3))

    def check(self) -> bool:
        """Count what was lost, repeated or judged wrong; return whether the search has ended."""
        try:
            events = list(read_events(self.run / LEDGER_FILE)) if (self.run / LEDGER_FILE).exists() else []
        except UserError:
            self.tally.unreadable += 1
            return False
        ends = [event for event in events if isinstance(event, TrialFinished)]
        now = {event.trial: event for event in ends}
        self.tally.lost += sum(now.get(number) != event for number, event in self.kept.items())
        self.tally.finished += len(now.keys() - self.kept.keys())
        self.kept = now
        if not any(event.event == "search_ended" for event in events):
            return False
        retried = [e for e in events if isinstance(e, TrialRetried) and e.kind is RetryKind.FAILURE]
        lost_nodes = [e for e in retried if e.failure is not None and e.failure.kind.value == "node_failed"]
        self.tally.wrong += sum(event.outcome.failure is not None for event in ends) + len(retried) - len(lost_nodes)
        refused = {e.trial for e in ends if e.outcome.admission and not e.outcome.admission.admitted}
        configs = [e.config for e in events if isinstance(e, TrialProposed) and e.trial not in refused]  # may run again
        self.tally.run_twice += len(ends) - len(now) + len(configs) - len(set(configs))
        return True


def disturb_clock(search: LiveSearch) -> None:
    """Let the wall clock of search and jobs step by up to two days while trials run; then kill the search."""
    process = search.start()
    search.await_moment(process, steps=True)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    search.wait(process, 0, 1, -signal.SIGKILL)


def disturb_namespace(search: LiveSearch) -> None:
    """Try to resume and to clean a living search from another PID namespace; then kill the search.

    Every third session itself runs in a namespace of its own, which ends with it, so its job is lost.
    """
    process = search.start(*(NEW_NAMESPACE if search.rng.random() < 1 / 3 else ()))
    search.await_moment(process, steps=False)
    held = (search.run / "lock").exists()
    for words in (["resume", search.run.name, "--quiet"], ["clean", search.run.name]) if held else ():
        rival = search.call(*words, prefix=tuple(NEW_NAMESPACE))
        search.wait(rival, 0, 1, 2)
        if process.poll() is None:  # else the search had ended, and the rival may do as it likes
            search.tally.rivals += 1
            search.tally.rivals_admitted += rival.returncode != 2
        search.tally.rivals_admitted += process.returncode == 2  # its folder was taken over
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    search.wait(process, 0, 1, 2, -signal.SIGKILL, 137)


LIVE = {"stepping clock, real jobs": (disturb_clock, 0.2), "second PID namespace, real jobs": (disturb_namespace, 1.0)}
"""What is done, and how long a trial takes: a command in a namespace takes seconds to begin."""


def disturb_searches(kind: str, moments: int, seed: int, folder: Path) -> LiveTally:
    """Disturb searches with real jobs in one way at that many random moments; finish the last one."""
    tally = LiveTally()
    disturb, trial_s = LIVE[kind]
    search = LiveSearch(folder, tally, random.Random(f"{kind}-{seed}"), trial_s=trial_s)
    while tally.moments < moments:
        tally.moments += 1
        disturb(search)
        if search.check():
            search.begin()
    search.step_clock(0.0)
    if (search.run / "search.yaml").exists():
        search.wait(search.start(), 1)  # simulated trials are never admitted: a search has no best configuration
        tally.unreadable += not search.check()
    left = find_processes_by_variable("CCL_TRIAL_DIR", str(folder))
    tally.left_running = len(left)
    terminate_processes(left)
    return tally


def find_problem() -> str | None:
    """Return why such searches cannot be disturbed here, or None."""
    if shutil.which("gcc") is None:
        return "no gcc"
    done = subprocess.run([*NEW_NAMESPACE, "true"], capture_output=True, check=False)
    return None if done.returncode == 0 else "no PID namespace can be made"
