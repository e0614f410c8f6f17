"""Which constants of a serving step fit measured servers best, with each model left out once.

    python benchmarks/serving_fit.py FOLDER

For each model: the constants with the least mean error of TPOT (log, models weighted equally) on the tables of all
others, and their error on its own tables beside that of the constants in use. FOLDER is as in benchmarks/serving.py.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import numpy as np
from serving import Table, find_errors, read_tables

import cclsearch.tasks.serving.steps as steps

GRID = {
    "SEQUENCE_S": (2e-5, 1e-5, 5e-6, 2e-6),
    "ENGINE_STEP_S": (1e-3, 2e-3, 3e-3),
    "COLLECTIVE_S": (4e-6, 8e-6, 1.6e-5),
    "MEMORY_SHARE": (0.6, 0.75, 0.85),
}


def model_of(table: Table) -> str:
    """The model in a table's name: `srv-MODEL-ACCELERATOR-LENGTHS`."""
    return re.sub(r"^srv-|-[a-z]+\d+-\d+x\d+$", "", table.name)


def measure(tables: list[Table], values: tuple[float, ...]) -> dict[str, float]:
    """Model -> mean error of TPOT with these constants."""
    for name, value in zip(GRID, values, strict=True):
        setattr(steps, name, value)
    found: dict[str, list[np.ndarray]] = {}
    for table in tables:
        found.setdefault(model_of(table), []).append(np.abs(find_errors(table)[:, 0]))
    return {model: float(np.concatenate(errors).mean()) for model, errors in found.items()}


def main() -> None:
    tables = list(read_tables(Path(sys.argv[1])))
    used = measure(tables, tuple(getattr(steps, name) for name in GRID))
    errors = {values: measure(tables, values) for values in itertools.product(*GRID.values())}
    print(f"| model left out | {' | '.join(GRID)} | its error | with those in use |\n|{' --- |' * (len(GRID) + 3)}")
    for model in used:
        best = min(errors, key=lambda v: np.mean([errors[v][other] for other in used if other != model]))
        cells = " | ".join(f"{value:g}" for value in best)
        print(f"| {model} | {cells} | {np.expm1(errors[best][model]):.0%} | {np.expm1(used[model]):.0%} |")


if __name__ == "__main__":
    main()
