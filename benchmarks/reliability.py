"""Interrupts searches over a recording at random moments and counts what was lost.

`python benchmarks/reliability.py --moments 200` searches a recording with the surrogate. Each search runs in a
process forked from this one, so that an interruption costs milliseconds: it is killed, or its disk or clock is
disturbed, and then resumed. Two kinds run real jobs (`live_searches.py`). Nothing trains.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.record.event import TrialFinished, TrialProposed
from cclsearch.record.ledger import LEDGER_FILE, read_events

sys.path.insert(0, str(Path(__file__).parent))

from live_searches import LIVE, LiveTally, disturb_searches, find_problem

BUDGET = 60
SEARCH = f"run --workload wl2 --launcher replay --budget {BUDGET} --quiet".split()
RANDOM = ["--sampler", "random"]
"""For the searches that run at once: they test the lock, not the strategy."""
SPAN_BYTES = 12_000
"""A search is interrupted after its ledger grew by up to this much: about six trials."""
WAIT_S = 120.0


@dataclass
class Tally:
    """Counts over all interruptions."""

    moments: int = 0
    searches: int = 0
    finished: int = 0
    """Finished trials at each interruption, summed over all interruptions."""
    lost: int = 0
    """Finished trials that were missing or changed at the next interruption."""
    run_twice: int = 0
    """Trials that finished twice, repeated a configuration, or ran again after they had ended."""
    unreadable: int = 0
    """Interruptions after which the ledger could not be read."""
    tracebacks: int = 0
    """Sessions that ended in something other than a result, a stop, a one-line error or the kill."""
    codes: dict[str, int] = field(default_factory=dict)


class Search:
    """Successive searches in one folder, interrupted and resumed."""

    def __init__(self, folder: Path, tally: Tally, rng: random.Random) -> None:
        self.folder, self.tally, self.rng = folder, tally, rng
        self.number = 0
        self.kept: dict[int, TrialFinished] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a new run."""
        self.number += 1
        self.tally.searches += 1
        self.kept = {}

    @property
    def run(self) -> Path:
        return self.folder / "runs" / f"r{self.number}"

    def command(self) -> list[str]:
        """Return the command that resumes the search, or starts it."""
        if (self.run / "search.yaml").exists():
            return ["resume", self.run.name, "--quiet"]
        return [*SEARCH, "--name", self.run.name, "--seed", str(self.number)]

    def check(self) -> bool:
        """Count what was lost or repeated since the last interruption; return whether the search has ended."""
        tally = self.tally
        ledger = self.run / LEDGER_FILE
        if not ledger.exists():
            return False
        try:
            events = list(read_events(ledger))
        except UserError:
            tally.unreadable += 1
            return False
        ends = [event for event in events if isinstance(event, TrialFinished)]
        now = {event.trial: event for event in ends}
        tally.lost += sum(now.get(number) != event for number, event in self.kept.items())
        tally.finished += len(now)
        refused = {e.trial for e in ends if e.outcome.admission and not e.outcome.admission.admitted}
        configs = [e.config for e in events if isinstance(e, TrialProposed) and e.trial not in refused]  # may run again
        self.kept = now
        ended = any(event.event == "search_ended" for event in events)
        if ended:
            tally.run_twice += len(ends) - len(now) + len(configs) - len(set(configs))
            tally.run_twice += len(list(self.run.glob("trials/*/attempts/*/result.json")))
        return ended


def start(action: Callable[[], int], folder: Path, log: Path) -> int:
    """Run an action in a forked process and return its id. It exits with the action's code, 70 for a traceback.

    The log is truncated first: the log of many sessions would exceed the limit of the simulated full disk.
    """
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.chdir(folder)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = action()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def wait(child: int) -> int:
    """Return the child's exit code, negative for a signal; a child that hangs is killed and counts as a traceback."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 71


def await_moment(search: Search, child: int) -> None:
    """Return at a random moment: one in six before any progress, else after some progress, or at the end."""
    if search.rng.random() < 1 / 6:
        time.sleep(search.rng.uniform(0, 0.05))
        return
    ledger = search.run / LEDGER_FILE
    target = search.rng.randint(1, SPAN_BYTES) + (ledger.stat().st_size if ledger.exists() else 0)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if ledger.exists() and ledger.stat().st_size >= target:
            break
        time.sleep(0.001)
    time.sleep(search.rng.uniform(0, 0.004))


def break_by_signal(search: Search, number: signal.Signals, log: Path) -> int:
    """Kill the search at a random moment."""
    child = start(lambda: main(search.command()), search.folder, log)
    await_moment(search, child)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, number)
    return wait(child)


def break_by_full_disk(search: Search, log: Path) -> int:
    """Limit the size of files: writing fails at a random moment, as on a full disk."""
    ledger = search.run / LEDGER_FILE
    room = (ledger.stat().st_size if ledger.exists() else 8_000) + search.rng.randint(0, 30_000)

    def action() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        return main(search.command())

    return wait(start(action, search.folder, log))


def break_by_lost_folder(search: Search, log: Path, away_s: float = 0.1) -> int:
    """Move the run folder away for a while, like a shared file system that is unavailable."""
    child = start(lambda: main(search.command()), search.folder, log)
    await_moment(search, child)
    away = search.folder / "away"
    with contextlib.suppress(FileNotFoundError):
        search.run.rename(away)
        time.sleep(away_s)
        if search.run.exists():  # a search that had just started created it again: the returned folder counts
            search.run.rename(search.folder / f"stray-{search.rng.random()}")
        away.rename(search.run)
    return wait(child)


def break_by_read_only(search: Search, log: Path) -> int:
    """Make the run's folders read-only for a while; the process has no right to change that."""
    user = 65534 if os.getuid() == 0 else None
    if user is not None:
        for base, folders, names in os.walk(search.folder):
            for path in (base, *(f"{base}/{name}" for name in (*folders, *names))):
                os.chown(path, user, user, follow_symlinks=False)

    def action() -> int:
        if user is not None:
            os.setgid(user)
            os.setuid(user)
        return main(search.command())

    child = start(action, search.folder, log)
    await_moment(search, child)
    folders = [path for path in (search.run / "trials", search.run) if path.is_dir()]
    for path in folders:
        path.chmod(0o555)
    code = wait(child)
    for path in folders:
        path.chmod(0o755)
    return code


def break_by_clock(search: Search, log: Path) -> int:
    """Let the wall clock jump by up to two days in both directions at every call; then kill the search."""
    if not (search.run / "search.yaml").exists():
        return break_by_signal(search, signal.SIGKILL, log)
    rng = random.Random(search.rng.random())
    real = time.time

    def jumpy() -> float:
        return real() + rng.choice((-172_800.0, -3_600.0, 0.0, 3_600.0, 172_800.0))

    def action() -> int:
        from cclsearch.loop.loop import run_search
        from cclsearch.loop.session import begin_or_resume, open_session
        from cclsearch.record.writer import RunWriter

        time.time = jumpy
        session = open_session(search.run)
        session = replace(session, now_s=jumpy, jobs=replace(session.jobs, now_s=jumpy))
        with RunWriter(search.run) as writer:
            begin_or_resume(writer, session)
            run_search(writer, session)
        return 0

    child = start(action, search.folder, log)
    await_moment(search, child)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return wait(child)


BREAKS: dict[str, Callable[[Search, Path], int]] = {
    "kill -9": lambda search, log: break_by_signal(search, signal.SIGKILL, log),
    "SIGTERM": lambda search, log: break_by_signal(search, signal.SIGTERM, log),
    "full disk": break_by_full_disk,
    "read-only disk": break_by_read_only,
    "clock jumps": break_by_clock,
    "lost file system": break_by_lost_folder,
}
EXPECTED = {0, 1, 2, -signal.SIGKILL, -signal.SIGTERM}


def break_searches(kind: str, moments: int, seed: int, *, away_s: float = 0.1) -> Tally:
    """Interrupt searches in one way at that many random moments; finish the last one."""
    breaks = {**BREAKS, "lost file system": partial(break_by_lost_folder, away_s=away_s)}
    tally, rng = Tally(), random.Random(f"{kind}-{seed}")
    with tempfile.TemporaryDirectory(prefix="ccl-break-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "ccl-search.yaml").write_text("{}\n")
        log = folder / "log.txt"
        log.touch()
        log.chmod(0o666)
        search = Search(folder, tally, rng)
        while tally.moments < moments:
            tally.moments += 1
            code = breaks[kind](search, log)
            tally.codes[str(code)] = tally.codes.get(str(code), 0) + 1
            if code not in EXPECTED:
                tally.tracebacks += 1
                print(f"exit code {code}: {log.read_text()[:3000]}", file=sys.stderr)
            if search.check():
                search.begin()
        if (search.run / "search.yaml").exists():
            wait(start(lambda: main(search.command()), folder, log))
            tally.unreadable += not search.check()
    return tally


def run_together(count: int) -> dict[str, int]:
    """Run that many searches at once in one project, then that many sessions on one run folder."""
    with tempfile.TemporaryDirectory(prefix="ccl-together-") as name:
        folder = Path(name)
        (folder / "ccl-search.yaml").write_text("{}\n")
        log = folder / "log.txt"
        commands = [[*SEARCH, *RANDOM, "--name", f"t{n}", "--seed", str(n)] for n in range(count)]
        children = [start(lambda words=words: main(words), folder, log) for words in commands]  # type: ignore[misc]
        codes = [wait(child) for child in children]
        trials = [
            len(
                {e.config for e in read_events(folder / "runs" / f"t{n}" / LEDGER_FILE) if isinstance(e, TrialProposed)}
            )
            for n in range(count)
        ]
        more = ["resume", "t0", "--budget", "100", "--quiet"]
        rivals = [wait(child) for child in [start(lambda: main(more), folder, log) for _ in range(count)]]
        events = list(read_events(folder / "runs" / "t0" / LEDGER_FILE))
        ends = [event.trial for event in events if isinstance(event, TrialFinished)]
        return {
            "searches": count,
            "ended": codes.count(0),
            "whole": trials.count(BUDGET),
            "rivals": count,
            "rivals_refused_or_late": rivals.count(2) + rivals.count(0) - 1,
            "rivals_broken": sum(code not in (0, 2) for code in rivals),
            "trials": len(ends),
            "trials_twice": len(ends) - len(set(ends)),
        }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=200, help="number of interruptions, over all kinds")
    parser.add_argument("--live-moments", type=int, help="of each kind with real jobs; default: as of the others")
    parser.add_argument("--together", type=int, default=10, help="searches at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*BREAKS, *LIVE], help="only this kind of interruption")
    parser.add_argument("--away-s", type=float, default=0.1, help="seconds that a lost file system is unavailable")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def measure() -> None:
    """Interrupt searches, count, and print the counts."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as warm:  # imports are done here once, not in every child
        os.chdir(warm)
        Path("ccl-search.yaml").write_text("{}\n")
        with contextlib.redirect_stdout(None):
            main([*SEARCH, "--name", "warm"])
        os.chdir("/")
    figures: dict[str, object] = {}
    problem = find_problem()
    kinds = [args.only] if args.only else [*BREAKS, *([] if problem else LIVE)]
    if problem and not args.json:
        print(f"no searches with real jobs: {problem}")
    for n, kind in enumerate(kinds):
        share = args.moments // len(kinds) + (n < args.moments % len(kinds))
        tally: Tally | LiveTally
        if kind in LIVE:
            with tempfile.TemporaryDirectory(prefix="ccl-live-") as live:
                tally = disturb_searches(kind, args.live_moments or share, args.seed, Path(live))
        else:
            tally = break_searches(kind, share, args.seed, away_s=args.away_s)
        figures[kind] = vars(tally)
        if not args.json:
            print(f"{kind}: {vars(tally)}", flush=True)
    if not args.only:
        figures["together"] = run_together(args.together)
    print(json.dumps(figures) if args.json else f"together: {figures.get('together', 'not run')}")


if __name__ == "__main__":
    measure()
