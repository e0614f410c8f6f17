"""How long engines take beside vLLM, from measured tables that know nothing of the served landscapes.

    python benchmarks/serving_engines.py FOLDER

FOLDER has tables of LLM-Inference-Bench (Argonne, BSD-3-Clause; `llmib-*/landscape.csv`): throughput of a batch by
engine, devices and batch size. Printed for each engine: the geometric mean over tables of the median over equal
devices and batch sizes of vLLM's throughput / its own, and the least and greatest of the tables' medians. The spread
over all pairs (standard deviation of the log) is what a prior of an unknown engine needs.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

REFERENCE = "vLLM"


def read_ratios(path: Path) -> dict[str, list[float]]:
    """Engine -> vLLM's throughput / its own, for each pair of equal devices and batch size."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    rates = {(row["engine"], row["num_devices"], row["batch_size"]): float(row["total_tok_s"]) for row in rows}
    found: dict[str, list[float]] = {}
    for (engine, *at), rate in rates.items():
        if engine != REFERENCE and (other := rates.get((REFERENCE, at[0], at[1]))):
            found.setdefault(engine, []).append(other / rate)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    tables: dict[str, list[list[float]]] = {}
    for path in sorted(args.folder.glob("llmib-*/landscape.csv")):
        if "engine" not in path.open().readline().split(","):
            continue
        for engine, ratios in read_ratios(path).items():
            tables.setdefault(engine, []).append(ratios)
    print("| engine | tables | pairs | time / vLLM's | least to greatest table | sd of the log |")
    print("| --- | --- | --- | --- | --- | --- |")
    for engine, groups in sorted(tables.items()):
        medians = [float(np.median(ratios)) for ratios in groups]
        every = np.log([ratio for ratios in groups for ratio in ratios])
        mean = float(np.exp(np.mean(np.log(medians))))
        spread = f"{min(medians):.2f} to {max(medians):.2f}"
        print(f"| {engine} | {len(groups)} | {len(every)} | {mean:.2f} | {spread} | {np.std(every):.2f} |")


if __name__ == "__main__":
    main()
