"""Searches how a real vLLM serves on this CPU, beside configurations drawn at random before the search.

    python benchmarks/vllm_cpu.py --python VLLM_PYTHON --runs FOLDER [--table benchmarks/vllm_cpu.csv]

VLLM_PYTHON is the interpreter that `python tests/vllm/install.py FOLDER` prints; the card is `vllm_cpu.yaml`. The
table is written row by row, and a broken-off run goes on where it stopped. First `--drawn` configurations of the
whole space are measured, then a search with `--budget` trials is run that knows nothing of them, then the best one of
both in turns: single measurements of the best of many are too good, so only the turns compare. A trial beside which
other processes used more than DISTURBED_CORES is measured once more.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cclsearch.card.load import load_card
from cclsearch.core.values import Config
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.tasks.serving.measurements import THROUGHPUT

CARD = Path(__file__).with_suffix(".yaml")
FIXED = {"enforce_eager": "true", "kv_cache_gib": "1"}
"""Eager mode keeps starts short."""
FIGURES = (THROUGHPUT, "tpot_mean_s", "ttft_mean_s", "start_s", "measuring_s")
DISTURBED_CORES = 0.1
TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--table", type=Path, default=CARD.with_suffix(".csv"))
    parser.add_argument("--drawn", type=int, default=40)
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    (args.runs / "vllm-cpu.yaml").write_text(
        f"launcher: local\npython: {args.python.absolute()}\nenvironment: {{OMP_NUM_THREADS: '2'}}\n", encoding="utf-8"
    )
    call("trust", str(args.runs))  # this script wrote the profile with the interpreter that it was given
    card = load_card(str(CARD))
    space = build_space(card, load_framework(card.framework))
    chosen = np.random.default_rng(args.seed).permutation(len(space))[: args.drawn]
    drawn = [space.config(int(row)) for row in chosen]
    print(f"{len(space)} configurations", flush=True)
    for number, config in enumerate(drawn):
        measure(args, f"drawn-{number}", config)
    found = search(args)
    rows = {row["trial"]: row for row in read_table(args.table)}
    measured = {rows[f"drawn-{number}"][THROUGHPUT]: config for number, config in enumerate(drawn)}
    best = {"drawn": measured[max(measured, key=float)], "searched": found}
    for turn in range(TURNS):
        for name in sorted(best, reverse=bool(turn % 2)):
            measure(args, f"again-{name}-{turn}", best[name])
    report(read_table(args.table), best)


def measure(args: argparse.Namespace, name: str, config: Config) -> None:
    """Measure one configuration as a search of one trial, and add it to the table unless it is there."""
    if any(row["trial"] == name for row in read_table(args.table)):
        return
    for attempt in ("", "-more"):
        figures = run(args, name + attempt, 1, {knob: str(value).lower() for knob, value in config.items()})[0]
        if float(figures["foreign_cores"]) <= DISTURBED_CORES:
            break
    append(args.table, {"trial": name, **config, **figures})


def search(args: argparse.Namespace) -> Config:
    """Search once; add its trials to the table, and return its best configuration."""
    name = f"search-{args.seed}"
    figures = run(args, name, args.budget, {})
    known = {row["trial"] for row in read_table(args.table)}
    for number, each in enumerate(figures, start=1):
        config = {k: v for k, v in json.loads(each.pop("config")).items() if k not in FIXED}
        if f"{name}-{number}" not in known:
            append(args.table, {"trial": f"{name}-{number}", **config, **each})
    answer = json.loads(call("best", name, "--runs", str(args.runs), "--json"))
    return Config({k: v for k, v in answer["config"].items() if k not in FIXED})


def run(args: argparse.Namespace, name: str, budget: int, knobs: Mapping[str, str]) -> list[dict[str, Any]]:
    """The figures of each trial of a search, which is run, or resumed, unless it has ended."""
    folder = args.runs / name
    if not (folder / "ledger.jsonl").is_file():
        limited = [word for knob, value in {**FIXED, **knobs}.items() for word in ("--knob", f"{knob}={value}")]
        words = ["-w", str(CARD), "-l", str(args.runs / "vllm-cpu.yaml"), "-b", str(budget), "--seed", str(args.seed)]
        call("run", *words, *limited, "--learn-from", "none", "--name", name, "--runs", str(args.runs))
    elif len(list(folder.glob("trials/*/metrics.json"))) < budget:
        call("resume", name, "--runs", str(args.runs))
    return [read_trial(trial) for trial in sorted(folder.glob("trials/[0-9]*"))]


def call(*words: str) -> str:
    """The output of a command of ccl-search; ends this script with its error if it fails."""
    done = subprocess.run([sys.executable, "-m", "cclsearch", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stdout}{done.stderr}")
    return done.stdout


def read_trial(folder: Path) -> dict[str, Any]:
    """A trial's configuration and figures; a failed one has the value 0."""
    files = {
        name: json.loads((folder / f"{name}.json").read_text()) if (folder / f"{name}.json").is_file() else {}
        for name in ("config", "result", "metrics")
    }
    metrics, extra = files["metrics"].get("metrics", files["metrics"]), files["result"].get("extra", {})
    own = {name: metrics.get(name, extra.get(name, 0)) for name in FIGURES}
    foreign = files["result"].get("foreign_cpu_cores") or 0
    return {**own, "foreign_cores": foreign, "config": json.dumps(files["config"]["config"])}


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows so far."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row, flushed, so that a kill loses none."""
    row = {k: (f"{v:.5g}" if isinstance(v, float) else v) for k, v in row.items() if k != "config"}
    is_new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)
    print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)


def report(rows: list[dict[str, str]], best: Mapping[str, Config]) -> None:
    """Print what was found: the best of each, and the turns."""

    def of(start: str) -> list[float]:
        return [float(row[THROUGHPUT]) for row in rows if row["trial"].startswith(start)]

    drawn, searched = of("drawn-"), of("search-")
    print(f"\n{len(drawn)} drawn: {min(drawn):.0f} to {max(drawn):.0f} tokens/s, median {median(drawn):.0f}")
    print(f"searched: best {max(searched):.0f}, after {1 + searched.index(max(searched))} of {len(searched)} trials")
    turns = {name: of(f"again-{name}-") for name in best}
    for name, values in turns.items():
        print(f"best {name} ({best[name]}): median {median(values):.0f} of {' '.join(f'{v:.0f}' for v in values)}")
    ratio = median(turns["searched"]) / median(turns["drawn"])
    noise = median(list(spreads(turns.values())))
    print(f"searched / best of the drawn: {ratio:.3f}; a repeat differs from its median by {noise:.1%} in the median")


def spreads(groups: Any) -> Iterator[float]:
    """How far each value is from its group's median, relatively."""
    for values in groups:
        middle = median(values)
        yield from (abs(value / middle - 1) for value in values)


if __name__ == "__main__":
    main()
