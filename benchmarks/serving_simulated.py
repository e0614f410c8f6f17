"""The simulation of continuous batching against the real small server: predicted and measured latencies of loads.

    python benchmarks/serving_simulated.py measure [--table benchmarks/serving_simulated.csv]
    python benchmarks/serving_simulated.py compare [--table benchmarks/serving_simulated.csv]

`measure` serves each of CASES with the run script `cpu-serving` (a server of torch on this CPU, over HTTP) and writes
a row for each, resumable; a case beside which other processes used more than DISTURBED_CORES is measured up to
ATTEMPTS times, and the least disturbed counts. `compare` calibrates the multipliers on the cases marked as known, and
prints predicted beside measured for the others, which the calibration has not seen.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.values import Config
from cclsearch.tasks.base import task_of
from cclsearch.tasks.serving.contract import RequestRecord
from cclsearch.tasks.serving.measurements import measure_load

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "launchers" / "cpu_serving.py"
REPEATS = 3
"""Loads of a case on one server; the medians of their metrics count."""
DISTURBED_CORES, ATTEMPTS = 0.3, 3
SHOWN = (
    "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "tpot_p50_s", "tpot_p99_s", "itl_p99_s", "e2e_p99_s",
    "output_tokens_per_s", "queue_mean_s", "tokens_per_step", "preemptions", "kv_cache_use_peak",
    "prefix_cache_hit_rate",
)  # fmt: skip
USUAL = {
    "max_num_seqs": 8, "max_num_batched_tokens": 128, "block_size": 16, "kv_cache_mib": 8, "chunked_prefill": True,
    "prefix_caching": False,
}  # fmt: skip
TRACE_SEED = 5


@dataclass(frozen=True)
class Case:
    """One load of one configuration."""

    name: str
    sets: Mapping[str, Any]
    """Fields of the card beside those of `tiny-serving`."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    is_known: bool = False
    """Whether the multipliers are calibrated on it."""


def closed(clients: int, given: int = 96, asked: int = 24, **more: Any) -> dict[str, Any]:
    return {
        "concurrency": clients,
        "num_requests": max(48, 6 * clients),
        "input_len": given,
        "output_len": asked,
        **more,
    }


def rate(per_s: float, **more: Any) -> dict[str, Any]:
    return {"arrival": "poisson", "request_rate": per_s, "num_requests": 150, **more}


CASES = (
    Case("closed-1", closed(1), is_known=True),
    Case("closed-8", closed(8), is_known=True),
    Case("closed-8-one-by-one", closed(8), {"max_num_seqs": 1}, is_known=True),
    Case("closed-8-long-prompts", closed(8, 320, 8), is_known=True),
    Case("closed-8-long-answers", closed(8, 32, 96), is_known=True),
    Case("closed-16-whole-prompts", closed(16), {"max_num_seqs": 16, "chunked_prefill": False}, is_known=True),
    Case("closed-2", closed(2)),
    Case("closed-4", closed(4)),
    Case("closed-16", closed(16), {"max_num_seqs": 16}),
    Case("closed-32", closed(32), {"max_num_seqs": 16, "max_num_batched_tokens": 256}),
    Case("closed-32-few-places", closed(32), {"max_num_seqs": 4}),
    Case("closed-16-small-steps", closed(16), {"max_num_seqs": 16, "max_num_batched_tokens": 32}),
    Case("closed-8-whole-prompts", closed(8), {"chunked_prefill": False}),
    Case("closed-8-prefixes", closed(8, shared_prefix_tokens=80), {"prefix_caching": True}),
    Case("closed-16-little-cache", closed(16, 96, 64), {"max_num_seqs": 16, "kv_cache_mib": 2, "block_size": 4}),
    Case("closed-16-unlike-lengths", closed(16, 128, 32, lengths="lognormal", length_spread=1.0), {"max_num_seqs": 16}),
    Case("poisson-5", rate(5)),
    Case("poisson-12", rate(12)),
    Case("poisson-20", rate(20)),
    Case("poisson-20-whole-prompts", rate(20), {"chunked_prefill": False, "max_num_seqs": 16}),
    Case("poisson-60-too-many", rate(60)),
    Case("bursts-12", rate(12, arrival="gamma", burstiness=2.0)),
    Case("trace", {"arrival": "trace", "num_requests": 150}),
    Case(
        "trace-prefill-alone", {"arrival": "trace", "num_requests": 150}, {"chunked_prefill": False, "max_num_seqs": 16}
    ),
)


def write_trace(path: Path) -> None:
    """Write a trace in the format of Azure's: bursts, and lengths of prompts and answers that differ widely."""
    rng = np.random.default_rng(TRACE_SEED)
    when = np.cumsum(rng.gamma(0.4, 0.09 / 0.4, 150))
    given = np.clip(rng.lognormal(4.2, 0.8, 150), 4, 500).astype(int)
    asked = np.clip(rng.lognormal(2.8, 0.7, 150), 2, 120).astype(int)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        writer.writerows(zip((f"{t:.4f}" for t in when), given, asked, strict=True))


def make_card(case: Case, folder: Path) -> Card:
    """The card of a case; a trace is written into the folder."""
    sets = dict(case.sets)
    if sets.get("arrival") == "trace":
        sets["request_trace"] = str(folder / "requests.csv")
        write_trace(folder / "requests.csv")
    card = load_card("tiny-serving", sets=[f"{name}={value}" for name, value in {"repeats": REPEATS, **sets}.items()])
    return card  # type: ignore[return-value]


def measure(case: Case) -> dict[str, float]:
    """The medians of the metrics of a case's loads, and the cores that other processes used meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        card = make_card(case, folder)
        payload = task_of(card).make_input(
            card, Config({**USUAL, **case.knobs}), is_measured=True, run_id="benchmark", trial=1, seed=0
        )
        (folder / "config.json").write_text(payload.model_dump_json(), encoding="utf-8")
        own = {"CCL_CONFIG": str(folder / "config.json"), "CCL_TRIAL_DIR": name, "CCL_TIMEOUT_S": "120"}
        environment = {**os.environ, **own, "CCL_JOB_NAME": "benchmark", "PYTHONPATH": str(SCRIPT.parent)}
        subprocess.run([sys.executable, str(SCRIPT)], env=environment, check=True, capture_output=True, timeout=180)
        result = json.loads((folder / "result.json").read_text())
        records = [RequestRecord.model_validate_json(line) for line in (folder / "evidence.jsonl").open()]
    loads = [
        {**load["metrics"], **measure_load([r for r in records if r.load == number], 1.0, {})}
        for number, load in enumerate(result["loads"])
    ]
    found = {name: float(np.median([load[name] for load in loads])) for name in SHOWN if name in loads[0]}
    return {**found, "foreign_cores": float(result.get("foreign_cpu_cores") or 0.0)}


def measure_all(table: Path) -> None:
    """Measure the cases that the table lacks."""
    known = read_table(table)
    for case in CASES:
        if case.name in known:
            continue
        tries = []
        while len(tries) < ATTEMPTS and min((each["foreign_cores"] for each in tries), default=9.0) > DISTURBED_CORES:
            tries.append(measure(case))
        append(table, case.name, min(tries, key=lambda each: each["foreign_cores"]))


def read_table(path: Path) -> dict[str, dict[str, float]]:
    """Case -> its measured metrics."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {
            row.pop("case"): {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        }


def append(path: Path, name: str, found: Mapping[str, float]) -> None:
    """Add a row, flushed, so that a kill loses none."""
    columns = ("case", *SHOWN, "foreign_cores")
    is_new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if is_new:
            writer.writeheader()
        writer.writerow({"case": name, **{metric: f"{value:.5g}" for metric, value in found.items()}})
    print(name, f"other processes used {found['foreign_cores']:.2f} cores", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "compare"))
    parser.add_argument("--table", type=Path, default=Path(__file__).with_suffix(".csv"))
    args = parser.parse_args()
    if args.what == "measure":
        measure_all(args.table)


if __name__ == "__main__":
    main()
