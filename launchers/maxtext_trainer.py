"""Runs MaxText's trainer as `python -m` would, with the attempt's nonce in the traces that it records.

python maxtext_trainer.py maxtext.trainers.pre_train.train SETTING=VALUE ...
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any


def mark_traces(profiler: Any, mark: str) -> None:
    """Let `start_trace` write this annotation at the start of each trace."""
    start_trace = profiler.start_trace

    def start(*args: Any, **kwargs: Any) -> None:
        start_trace(*args, **kwargs)
        with profiler.TraceAnnotation(mark):
            pass

    profiler.start_trace = start


def main() -> None:
    here = Path(__file__).resolve().parent
    # this folder has a `maxtext.py`, which must not be imported instead of the package
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if Path(path or ".").resolve() != here)]
    import jax

    mark_traces(jax.profiler, f"ccl-search::{os.environ.get('CCL_NONCE', '')}")
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
