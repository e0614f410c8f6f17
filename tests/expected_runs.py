"""The expected contents of the recorded runs of version 0.1.0: what that version printed of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from recorded_versions import (
    copy_run,
)


def layout(tp: int, pp: int, dp: int, zero: int, micro: int) -> dict[str, Any]:
    """Return a configuration of the recorded 8B model."""
    return {"tp": tp, "pp": pp, "dp": dp, "zero_stage": zero, "micro_batch_size": micro}


def tiny(dp: int, micro: int) -> dict[str, Any]:
    """Return a configuration of `tiny`, in the order of its knobs."""
    more = {"activation_checkpointing": "none", "zero_stage": 0}
    return {"tp": 1, "dp": dp, "pp": 1, "micro_batch_size": micro, **more}


@dataclass(frozen=True)
class ExpectedRun:
    """The expected contents of a recorded run."""

    kind: str
    best: dict[str, Any]
    trial: int
    """The number of the best trial."""
    step_time_s: float
    shown: str
    """The step time of the best trial, in seconds, as the text output shows it."""
    num_trials: int
    first: dict[str, Any]
    """The configuration of trial 1."""
    standing: str = "ended"
    provenance: str = "recorded"
    num_accelerators: int = 16
    not_admitted: tuple[int, ...] = ()
    unfinished: tuple[int, ...] = ()
    needs: tuple[str, ...] = field(default=())
    """Other fixtures to which the run refers."""


JAX = {"tp": 1, "dp": 2, "ep": 1, "micro_batch_size": 8, "activation_checkpointing": "none"}
START = layout(1, 2, 8, 1, 1)
WIDE = layout(2, 1, 64, 1, 1)
PIPE8 = layout(1, 8, 2, 0, 1)
TENSOR4 = layout(4, 1, 4, 0, 2)
MEASURED = {"provenance": "measured"}
RUNS = [
    ExpectedRun("replayed", TENSOR4, 5, 9.5477, "9.548", 5, START),
    ExpectedRun("stopped", PIPE8, 3, 9.92659, "9.927", 4, START, standing="stopped", unfinished=(4,)),
    ExpectedRun("killed", layout(1, 4, 4, 1, 1), 2, 8.99, "8.99", 4, START, standing="killed", unfinished=(3, 4)),
    ExpectedRun("hybrid", TENSOR4, 5, 9.5477, "9.548", 6, START),
    ExpectedRun("policy", layout(2, 1, 8, 1, 1), 2, 9.31587, "9.316", 4, START, not_admitted=(3,)),
    ExpectedRun("llm-alone", PIPE8, 3, 9.92659, "9.927", 4, START),
    ExpectedRun("learned", TENSOR4, 3, 9.5477, "9.548", 3, PIPE8, needs=("replayed",)),
    ExpectedRun(
        *("swept", layout(4, 1, 128, 0, 2), 9, 0.66053, "0.6605", 10, WIDE),
        num_accelerators=512,
        not_admitted=(3,),
        needs=("recordings",),
    ),
    ExpectedRun(
        *("front", layout(4, 1, 128, 1, 2), 4, 1.28504, "1.285", 8, WIDE),
        num_accelerators=512,
        not_admitted=(3,),
        needs=("recordings",),
    ),
    ExpectedRun("measured", tiny(2, 4), 2, 0.097716915, "0.09772", 3, tiny(2, 8), num_accelerators=2, **MEASURED),
    ExpectedRun("on-slurm", tiny(1, 16), 1, 0.173563291, "0.1736", 2, tiny(1, 16), num_accelerators=1, **MEASURED),
    ExpectedRun("on-tpu", JAX, 1, 0.321479321, "0.3215", 1, JAX, num_accelerators=2, **MEASURED),
]
BY_KIND = {expected.kind: expected for expected in RUNS}
each_run = pytest.mark.parametrize("expected", RUNS, ids=lambda expected: expected.kind)


def copy_with_needs(project: Path, expected: ExpectedRun) -> Path:
    """Copy the run, and the fixtures to which it refers, into the project."""
    for kind in expected.needs:
        copy_run(project, kind)
    return copy_run(project, expected.kind)
