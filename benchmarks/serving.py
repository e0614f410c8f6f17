"""Prediction and search of serving on measured landscapes: errors of TTFT and TPOT, and regret under a TPOT limit.

    python benchmarks/serving.py FOLDER [--peer PEER.csv] [--kernel-tables]
    python benchmarks/serving.py FOLDER --simulated

FOLDER has tables of an engine's TTFT and TPOT by configuration and concurrency (`landscape.csv` with `card.yaml`). A
cell is a table with a limit on TPOT, if at least four configurations differ by over 5 % and one keeps it. A trial
launches one configuration and measures it at every recorded concurrency; its value is the largest throughput per
accelerator whose TPOT keeps the limit, or 0. Regret after k trials is 1 - best so far / best of the cell, and the mean
of several seeds. The search learns from every load of a trial, and knows before which loads a row has. Throughput in
these tables follows from their latencies by Little's law. `--simulated` prints the errors of
the step-by-step simulation instead. `--peer` has aiconfigurator's predictions of every load
(benchmarks/serving_peer.py): its picks are tried in the order of their predicted values, and cells that it can order
are counted for all. `--kernel-tables` has predictions and searches use its measured kernels as a prior, where it knows
model and accelerator (needs `pip install aiconfigurator`).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.study.choose import make_sampler
from cclsearch.scoring.objective import choose_objective
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.columns import take_rows
from cclsearch.tasks.base import task_of
from cclsearch.tasks.serving.closed_form.kernel_tables import PACKAGE, make_kernel_prior, require_kernel_tables
from cclsearch.tasks.serving.closed_form.replica import read_replica
from cclsearch.tasks.serving.closed_form.steady_state import serve
from cclsearch.tasks.serving.closed_form.steps import MULTIPLIERS, compute_load
from cclsearch.tasks.serving.contract import PlannedRequest
from cclsearch.tasks.serving.measurements import THROUGHPUT
from cclsearch.tasks.serving.simulation.load import SimulatedLoad, Simulator

KNOBS = ("backend", "precision", "tp", "pp", "dp", "ep")
"""`dp` is accelerators / (`tp` x `pp`): with data-parallel attention the tables count them in `ep` alone."""
LIMITS_MS = (8, 10, 15, 20, 30, 50)
MILESTONES = (1, 3, 5)
MIN_CONFIGS, MANY_CONFIGS = 4, 8
SEARCHES = 3
"""Searches of a cell, each with a seed of its own."""


@dataclass(frozen=True)
class Table:
    """One landscape: its card, its configurations, and (row, concurrency, TTFT, TPOT, throughput per accelerator)."""

    name: str
    card: Card
    space: Space
    loads: tuple[tuple[int, float, float, float, float], ...]

    def value(self, row: int, limit_s: float) -> tuple[float, float]:
        """Largest throughput whose TPOT keeps the limit, else 0, and the TPOT there or the least one."""
        own = [(rate, tpot) for at, _, _, tpot, rate in self.loads if at == row]
        kept = [pair for pair in own if pair[1] <= limit_s]
        return max(kept) if kept else (0.0, min(tpot for _, tpot in own))


def read_tables(folder: Path, *, kernels: bool = False) -> Iterator[Table]:
    """The tables of aggregated serving in a folder; with `kernels`, those whose kernels were measured ask for them."""
    for path in sorted(folder.glob("srv-*/landscape.csv")):
        if path.parent.name.startswith("srv-disagg"):
            continue
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
        configs = [{name: _read_value(name, row) for name in KNOBS} for row in rows]
        unique = list({tuple(config.values()): config for config in configs}.values())
        knobs = tuple(Knob(name, tuple(sorted({config[name] for config in unique}))) for name in KNOBS)
        at = [[float(r["concurrency"]) for r, c in zip(rows, configs, strict=True) if c == config] for config in unique]
        space = space_from_rows(knobs, unique, at)
        most = max(int(row["concurrency"]) for row in rows)
        sets = ["precision=bf16", "task=serving", f"max_concurrency={most}"]
        try:
            card = load_card(str(path.with_name("card.yaml")), sets=sets)
            if kernels:
                asking = load_card(str(path.with_name("card.yaml")), sets=[*sets, f"kernel_tables={PACKAGE}"])
                with contextlib.suppress(UserError):
                    require_kernel_tables(asking)  # type: ignore[arg-type]
                    card = asking
        except (UserError, ValueError) as error:
            print(f"left out {path.parent.name}: {error}", file=sys.stderr)
            continue
        figures = ("concurrency", "ttft_s", "tpot_s", "output_tok_s_per_gpu_est")
        loads = tuple(
            (space.row(config), *(float(row[name]) for name in figures))
            for row, config in zip(rows, configs, strict=True)
        )
        yield Table(path.parent.name, card, space, loads)  # type: ignore[arg-type]


def _read_value(name: str, row: Mapping[str, str]) -> int | str:
    if name in ("backend", "precision"):
        return row[name]
    if name == "dp":
        return max(1, int(row["num_gpus"]) // (int(row["tp"]) * int(row["pp"])))
    return int(row["num_gpus"]) // int(row["pp"]) if row[name] == "true" else int(row[name])


def find_errors(table: Table) -> np.ndarray:
    """(n, 2) log of predicted over measured TPOT and TTFT, before any trial."""
    work, at = table.card.work, read_replica(table.card, table.space)
    lengths = float(work["input_len"]), float(work["output_len"])
    kernels, rows_N = make_kernel_prior(table.card, table.space, at, lengths), np.arange(len(table.space))
    errors = []
    for row, concurrency, ttft_s, tpot_s, _ in table.loads:
        parts = compute_load(table.card, at, concurrency, *lengths)
        if kernels is not None:
            parts = kernels.lean(parts, rows_N, concurrency)
        served = serve(parts, np.zeros(len(MULTIPLIERS)))
        errors.append((np.log(served.tpot_s[row] / tpot_s), np.log(served.ttft_s[row] / ttft_s)))
    return np.array(errors)


def find_simulated_errors(table: Table) -> np.ndarray:
    """(n, 3) log of simulated over measured TPOT, TTFT and throughput, before any trial: four requests a client."""
    work, at = table.card.work, read_replica(table.card, table.space)
    asked = PlannedRequest(input_tokens=int(work["input_len"]), output_tokens=int(work["output_len"]))
    errors = []
    for clients in sorted({int(load[1]) for load in table.loads}):
        own = [load for load in table.loads if load[1] == clients]
        rows = np.array([load[0] for load in own])
        load = SimulatedLoad((asked,) * max(4 * clients, 32), clients, {})
        found = Simulator.read(table.card, take_rows(at, rows)).run(load, np.zeros(len(MULTIPLIERS)))
        for n, (_, _, ttft_s, tpot_s, rate) in enumerate(own):
            measured = {"tpot_mean_s": tpot_s, "ttft_mean_s": ttft_s, THROUGHPUT: rate}
            errors.append([np.log(found[name][n] / value) for name, value in measured.items()])
    return np.array(errors)


def search(table: Table, limit_s: float, values: Mapping[int, tuple[float, float]], seed: int) -> list[int]:
    """Rows in the order in which the default sampler tries them."""
    text = f"tpot_mean_s <= {limit_s}"
    task = task_of(table.card)
    objective = task.constrain(table.card, choose_objective(THROUGHPUT, (text,), task=table.card.task))
    card = task.freeze(table.card, objective)
    seen: list[Observation] = []
    for trial in range(1, min(len(values), MILESTONES[-1]) + 1):
        view = SearchView(
            card, table.space, tuple(seen), frozenset(), max(1, 15 - trial), seed, objective, next_trial=trial
        )
        proposals = make_sampler("default").propose(view, 1)
        if not proposals:
            break
        row = table.space.row(proposals[0].config)
        assert row is not None
        rate, tpot = values[row]
        least = min(rate for rate, _ in values.values() if rate > 0)
        metrics = {THROUGHPUT: rate or least / 10, "tpot_mean_s": tpot}
        violation = objective.violation(metrics)
        loss = None if violation else objective.loss(metrics)
        loads = tuple(
            {"concurrency": c, "ttft_mean_s": ttft_s, "tpot_mean_s": tpot_s, THROUGHPUT: each}
            for at, c, ttft_s, tpot_s, each in table.loads
            if at == row
        )
        seen.append(
            Observation(trial, proposals[0].config, row, loss, metrics=metrics if loss else {"tpot_mean_s": tpot},
                        loads=loads, violation=violation)
        )  # fmt: skip
    tried = [o.row for o in seen if o.row is not None]
    return tried + [row for row in values if row not in tried]


def measure_regret(order: Sequence[int], values: Mapping[int, tuple[float, float]]) -> list[float]:
    """Regret after each milestone."""
    best = max(rate for rate, _ in values.values())
    return [1 - max(values[row][0] for row in order[:count]) / best for count in MILESTONES]


def read_peer(path: Path) -> dict[tuple[str, tuple[int | str, ...]], list[tuple[float, float, float]]]:
    """(Table, configuration) -> (concurrency, TTFT, TPOT) of each load, as the peer predicts them."""
    found: dict[tuple[str, tuple[int | str, ...]], list[tuple[float, float, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            own = found.setdefault((row["table"], tuple(_read_value(name, row) for name in KNOBS)), [])
            if row["tpot_s"]:
                own.append((float(row["concurrency"]), float(row["ttft_s"]), float(row["tpot_s"])))
    return found


def order_by_peer(table: Table, limit_s: float, peer: Mapping[Any, Any]) -> list[int] | None:
    """Rows by predicted value, those without one last and by their least TPOT; None if it predicts none."""
    answer, ranks = float(table.card.work["output_len"]), table.space.num_accelerators_N
    keys = []
    for row in range(len(table.space)):
        config = table.space.config(row)
        loads = peer.get((table.name, tuple(config[name] for name in KNOBS)), ())
        kept = [n * answer / (ttft + tpot * (answer - 1)) / ranks[row] for n, ttft, tpot in loads if tpot <= limit_s]
        least = min((tpot for _, _, tpot in loads), default=np.inf)
        keys.append((-max(kept, default=0.0), least, row))
    return None if all(np.isinf(least) for _, least, _ in keys) else [row for _, _, row in sorted(keys)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--kernel-tables", action="store_true")
    args = parser.parse_args()
    peer = read_peer(args.peer) if args.peer else {}
    tables = list(read_tables(args.folder, kernels=args.kernel_tables))
    errors = np.concatenate([find_errors(table) for table in tables])
    tpot, ttft = np.expm1(np.median(np.abs(errors), axis=0))
    print(f"{len(errors)} loads of {len(tables)} tables, before any trial:")
    print(f"median error of TPOT {tpot:.0%}, of TTFT {ttft:.0%}\n")
    if args.simulated:
        simulated = np.concatenate([find_simulated_errors(table) for table in tables])
        found = np.expm1(np.median(np.abs(simulated), axis=0))
        print("simulated: median error of TPOT {:.0%}, of TTFT {:.0%}, of throughput {:.0%}".format(*found))
        return
    regrets: dict[tuple[int, str], list[list[float]]] = {}
    for table in tables:
        for limit_ms in LIMITS_MS:
            values = {row: table.value(row, limit_ms / 1e3) for row in range(len(table.space))}
            rates = [rate for rate, _ in values.values()]
            if len(values) < MIN_CONFIGS or max(rates) == 0 or min(rates) > 0.95 * max(rates):
                continue
            accelerators = table.space.num_accelerators_N
            orders = {
                "surrogate": [search(table, limit_ms / 1e3, values, seed) for seed in range(SEARCHES)],
                "random": [list(np.random.default_rng(seed).permutation(len(values))) for seed in range(20)],
                "fewest accelerators first": [
                    sorted(values, key=lambda row: (accelerators[row], order[row]))
                    for order in (np.random.default_rng(seed).permutation(len(values)) for seed in range(20))
                ],
            }
            if peer:
                if (picks := order_by_peer(table, limit_ms / 1e3, peer)) is None:
                    continue
                orders["aiconfigurator's picks"] = [picks]
            for name, tried in orders.items():
                found = list(np.mean([measure_regret(order, values) for order in tried], axis=0))
                for least in (MIN_CONFIGS, MANY_CONFIGS):
                    if len(values) >= least:
                        regrets.setdefault((least, name), []).append(found)
    print(
        "| cells with at least | order of trials | cells | regret @1 | @3 | @5 |\n| --- | --- | --- | --- | --- | --- |"
    )
    for (least, name), found in sorted(regrets.items()):
        mean = np.mean(found, axis=0)
        print(
            f"| {least} configurations | {name} | {len(found)} | " + " | ".join(f"{each:.3f}" for each in mean) + " |"
        )
    for least in (MIN_CONFIGS, MANY_CONFIGS) if peer else ():
        ours, theirs = (np.mean(regrets[least, name], axis=0) for name in ("surrogate", "aiconfigurator's picks"))
        ratios = " / ".join(f"{ratio:.2f}" for ratio in ours / theirs)
        print(f"\nsurrogate over aiconfigurator, cells with at least {least} configurations: {ratios} after 1 / 3 / 5")


if __name__ == "__main__":
    main()
