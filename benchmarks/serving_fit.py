"""Which constants of a serving step fit measured servers best, with each model left out once.

    python benchmarks/serving_fit.py FOLDER

For each model: the constants with the least mean error of TPOT (log, models weighted equally) on the tables of all
others, and their error on its own tables beside that of the constants in use; then the same of TTFT, for the constants
of the first token. FOLDER is as in benchmarks/serving.py.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
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
FIRST_TOKEN = {"REQUEST_S": (0.01, 0.03, 0.05, 0.08), "TOGETHER": (0.05, 0.15, 0.3, 0.5)}


def model_of(table: Table) -> str:
    """The model in a table's name: `srv-MODEL-ACCELERATOR-LENGTHS`."""
    return re.sub(r"^srv-|-[a-z]+\d+-\d+x\d+$", "", table.name)


def measure(tables: list[Table], names: Sequence[str], values: Sequence[float], column: int) -> dict[str, float]:
    """Model -> mean error of TPOT (column 0) or TTFT (1) with these constants."""
    for name, value in zip(names, values, strict=True):
        setattr(steps, name, value)
    found: dict[str, list[np.ndarray]] = {}
    for table in tables:
        found.setdefault(model_of(table), []).append(np.abs(find_errors(table)[:, column]))
    return {model: float(np.concatenate(errors).mean()) for model, errors in found.items()}


def main() -> None:
    tables = list(read_tables(Path(sys.argv[1])))
    compare(tables, GRID, 0)
    print()
    compare(tables, FIRST_TOKEN, 1)


def compare(tables: list[Table], grid: Mapping[str, Sequence[float]], column: int) -> None:
    """Print the constants that are best without each model, and its error with them."""
    in_use = [getattr(steps, name) for name in grid]
    used = measure(tables, tuple(grid), in_use, column)
    errors = {values: measure(tables, tuple(grid), values, column) for values in itertools.product(*grid.values())}
    measure(tables, tuple(grid), in_use, column)
    print(f"| model left out | {' | '.join(grid)} | its error | with those in use |\n|{' --- |' * (len(grid) + 3)}")
    for model in used:
        best = min(errors, key=lambda v: np.mean([errors[v][other] for other in used if other != model]))
        cells = " | ".join(f"{value:g}" for value in best)
        print(f"| {model} | {cells} | {np.expm1(errors[best][model]):.0%} | {np.expm1(used[model]):.0%} |")


if __name__ == "__main__":
    main()
