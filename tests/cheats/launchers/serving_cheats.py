"""The run script `cpu_serving` with one trick each: of the load generator in this process, of the server in its own.

The run folder's `tricks.json` says which, as for training; `serving_cheats_server.py` is the server of tricks that have
one.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "launchers"))

import cpu_serving
import serving_run
import serving_tricks  # noqa: F401  importing registers the tricks
import unseen_serving  # noqa: F401
from common import Trial, run_rank
from serving_tool import TRICKS, name_trick


def serve(trial: Trial) -> None:
    """Run the whole trial with its trick; the machine is shared, so the load of other processes is not reported."""
    write = serving_run.write_result
    serving_run.write_result = lambda trial, **fields: write(trial, **{**fields, "foreign_cpu_cores": None})
    name = name_trick(trial)
    cpu_serving.SERVER = Path(__file__).with_name("serving_cheats_server.py")
    if name != "honest":
        TRICKS[name](trial)
    cpu_serving.serve(trial)


if __name__ == "__main__":
    sys.exit(run_rank(serve))
