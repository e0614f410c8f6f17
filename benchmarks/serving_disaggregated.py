"""Predicted against measured TTFT, TPOT and throughput of disaggregated serving, before any trial.

    python benchmarks/serving_disaggregated.py FOLDER

FOLDER has recordings with columns `prefill_workers`, `decode_workers` and their layouts (`srv-disagg-*`). Nothing in
the closed form of workers apart was chosen on them; its parts are those of servers that do both. Printed for each
table: the median error of each figure over its loads (median of max(p/m, m/p) - 1), the bias of its log, and Spearman's
rank correlation of throughput per accelerator.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

import cclsearch.tasks.builtin  # noqa: F401  registers the tasks
from cclsearch.recording.load import load_recording
from cclsearch.tasks.serving.disaggregation import compute_parts, read_deployment
from cclsearch.tasks.serving.measurements import THROUGHPUT
from cclsearch.tasks.serving.steady_state import serve
from cclsearch.tasks.serving.steps import MULTIPLIERS

FIGURES = ("ttft_mean_s", "tpot_mean_s", THROUGHPUT)


def compare(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(n, 3) predicted and measured figures of every load of a recording."""
    recording = load_recording(path)
    card, work = recording.card, recording.card.work
    at = read_deployment(card, recording.space)
    predicted, measured = [], []
    for number, row in enumerate(recording.rows):
        for load in row.loads:
            parts = compute_parts(card, at, load["concurrency"], float(work["input_len"]), float(work["output_len"]))
            served = serve(parts, np.zeros(len(MULTIPLIERS)))
            predicted.append([served.ttft_s[number], served.tpot_s[number], 1 / served.cost[number]])
            measured.append([load[name] for name in FIGURES])
    return np.array(predicted), np.array(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print("| table | loads | TTFT | TPOT | throughput | bias of the three | rank correlation |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for path in sorted(args.folder.glob("srv-disagg-*")):
        predicted, measured = compare(path)
        errors = np.log(predicted / measured)
        middle = np.expm1(np.median(np.abs(errors), axis=0))
        bias = ", ".join(f"{np.exp(each):.2f}" for each in np.median(errors, axis=0))
        order = spearmanr(predicted[:, 2], measured[:, 2])[0]
        shown = " | ".join(f"{each:.0%}" for each in middle)
        print(f"| {path.name} | {len(errors)} | {shown} | {bias} | {order:.2f} |")


if __name__ == "__main__":
    main()
