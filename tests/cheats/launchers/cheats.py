"""The run script `cpu` with one trick: each function in the modules of tricks changes what is trained, timed, traced or
reported.

The run folder's `tricks.json` says which: configuration -> name; others, such as references, are honest. Every
trick tells one lie as well as it can: whatever else the gate asks is true.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "launchers"))

import cpu
import numeric_tricks  # noqa: F401  importing registers the tricks of each module
import rehearsal_tricks  # noqa: F401
import time_tricks  # noqa: F401
import trace_tricks  # noqa: F401
import unseen_layout  # noqa: F401
import unseen_time  # noqa: F401
import unseen_trace  # noqa: F401
import work_tricks  # noqa: F401
from common import Trial, read_trial
from trick_tools import TRICKS, name_trick, report
from unseen_tools import BEFORE


def honest(trial: Trial) -> None:
    """No trick: the machine is shared, so the load of other processes is not reported."""
    report(foreign_cpu_cores=None)


def train(trial: Trial) -> None:
    """Run one rank with the trial's trick."""
    honest(trial)
    name = name_trick(trial)
    for part in name.split("+") if name != "honest" else ():
        TRICKS[part](trial)
    cpu.train(trial)


def use_one_rank(trial: Trial) -> None:
    trial.data["num_ranks"], trial.config["dp"] = 1, 1  # type: ignore[index]
    trial.data["gradient_accumulation"] *= 2  # type: ignore[index]


def main() -> int:
    trial = read_trial()
    name = name_trick(trial)
    if name.startswith("one_rank_t"):
        use_one_rank(trial)
    os.environ["CHEATS_MAIN"] = str(os.getpid())
    for part in name.split("+"):
        if part in BEFORE:
            BEFORE[part](trial)
    return int(cpu.fork_ranks(trial, train, __file__))


if __name__ == "__main__":
    sys.exit(main())
