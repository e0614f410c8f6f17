"""The parts of `gpu.py` on the search: every configuration measured, predictions, replays, and a real search."""

from __future__ import annotations

import csv
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_machine import Bench

from cclsearch.core.values import Config
from cclsearch.plugins import TASKS

NEAR = 1.02
DISTURBED = ("spread", "load", "warmup", "trace_time")
"""Rules that other processes on a machine with few cores make a trial break."""
STEP_TIME, MEMORY = "step_time_s", "peak_memory_gib"


def make_trial(bench: Bench, config: Config, folder: Path) -> Any:
    """Return what the run script reads of a trial with this configuration, with the input that a search writes."""
    payload = TASKS.get("training").make_input(
        bench.card, config, is_measured=True, run_id="table", trial=1, seed=0, nonce="gpu-benchmark"
    )
    data = json.loads(payload.model_dump_json())
    return sys.modules["common"].Trial(folder, data, data["config"])


def make_trainer(bench: Bench, config: Config) -> Any:
    """Return the run script's trainer of this configuration, alone on the device."""
    torch._dynamo.reset()
    bench.free()
    if bench.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    layout = sys.modules["cpu_model"].Layout(0, tp=1, dp=1, pp=1, ep=1)
    return bench.script.make_trainer(make_trial(bench, config, bench.folder), layout, bench.device)


def measure_table(bench: Bench) -> None:
    """Measure every configuration in this process, with the run script's own trainer, and write a recording."""
    builder = sys.modules["cpu_model"].Builder
    builder.draw = _draw_once(builder.draw)  # the same weights in every configuration: drawing them takes longest
    space, started = bench.space(), time.monotonic()
    rows = list(range(len(space)))
    random.Random(0).shuffle(rows)
    for row in rows:
        if time.monotonic() - started > bench.report.table_s:
            bench.report.note(
                f"{len(bench.table)} of {len(space)} configurations in {bench.report.table_s:.0f} s; the rest left out"
            )
            break
        config = space.config(row)
        bench.table[config] = _measure(bench, config)
    bench.script.choose_attention("auto")
    ok = {config: row for config, row in bench.table.items() if row["status"] == "ok"}
    best = min(ok, key=lambda config: ok[config][STEP_TIME])
    times = [row[STEP_TIME] for row in ok.values()]
    bench.report.figures |= {
        "configurations": len(bench.table),
        "out of memory": sum(row["status"] == "oom" for row in bench.table.values()),
        "best": str(best),
        "best step (s)": min(times),
        "slowest over best": max(times) / min(times),
        "table (s)": time.monotonic() - started,
    }
    losses = np.array([row["losses"] for row in ok.values()])
    apart = np.abs(losses - np.median(losses, axis=0)).max()
    bench.report.check(
        "losses of a configuration beside the others'", "at most 0.05 apart", f"{apart:.2g}", apart <= 0.05
    )
    again = _measure(bench, best)
    bench.report.figures["best measured again"] = again[STEP_TIME] / ok[best][STEP_TIME]
    failed = [f"{config}: {row['error']}" for config, row in bench.table.items() if row["status"] == "failed"]
    bench.report.check("configurations that end in an error", "none", "; ".join(failed)[:600] or "none", not failed)
    _write_recording(bench)


def _draw_once(draw: Any) -> Any:
    """Return `Builder.draw` with a memory; the count of parameters, which it loses, is not read here."""
    drawn: dict[Any, torch.Tensor] = {}

    def draw_or_recall(self: Any, name: str, *shape: int, **options: Any) -> torch.Tensor:
        key = name, shape, self.seed
        if key not in drawn:
            drawn[key] = draw(self, name, *shape, **options)
        return drawn[key]

    return draw_or_recall


def _measure(bench: Bench, config: Config) -> dict[str, Any]:
    """Return status, step time and peak memory of one configuration."""
    warmup, timed = (1, 3) if bench.small else (2, 3)
    try:
        trainer = make_trainer(bench, config)
        times = []
        for step in range(warmup + timed):
            if step == warmup and bench.is_gpu:
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            trainer.run_step()
            bench.synchronize()
            times.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return {"status": "oom"}
    except Exception as error:
        return {"status": "failed", "error": f"{type(error).__name__}: {str(error)[:200]}"}
    peak = torch.cuda.max_memory_allocated() / 2**30 if bench.is_gpu else None
    return {
        "status": "ok", STEP_TIME: statistics.median(times[warmup:]), MEMORY: peak,
        "losses": [float(loss) for loss in trainer.losses],
    }  # fmt: skip


def _write_recording(bench: Bench) -> None:
    folder = bench.out / "landscape"
    folder.mkdir(exist_ok=True)
    shutil.copyfile(bench.folder / "card.yaml", folder / "card.yaml")
    names = list(next(iter(bench.table)))
    with (folder / "trials.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*names, "status", STEP_TIME, MEMORY])
        for config, row in bench.table.items():
            knobs = [str(config[name]).lower() if isinstance(config[name], bool) else config[name] for name in names]
            table.writerow([*knobs, row["status"], row.get(STEP_TIME, ""), row.get(MEMORY) or ""])


def search_for_real(bench: Bench) -> None:
    """Search with the product, each trial a process of its own, and compare with the table."""
    budget, runs = 1 if bench.small else 8, bench.out / "runs"
    shutil.rmtree(runs / "search", ignore_errors=True)
    bench.free()
    command = [sys.executable, "-m", "cclsearch"]
    words = f"run -w {bench.folder / 'card.yaml'} -l here -b {budget} --name search --quiet".split()
    started = time.monotonic()
    done = subprocess.run([*command, *words, "--runs", str(runs), *bench.options], capture_output=True, text=True)
    bench.report.figures["search (s)"] = time.monotonic() - started
    ledger = runs / "search" / "ledger.jsonl"
    if not ledger.is_file():
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(done.stderr.split())[-300:]}")
    events = [json.loads(line) for line in ledger.read_text().splitlines()]
    outcomes = [event["outcome"] for event in events if event["event"] == "trial_finished"]
    bench.report.check(
        "trials that ended", str(budget), f"{len(outcomes)} {done.stderr[-300:]}", len(outcomes) == budget
    )
    if bench.is_gpu:  # on a CPU that other work shares, no trial may be admitted
        bench.report.check("exit code of the search", "0", str(done.returncode), done.returncode == 0)
    broken = [
        f"trial {number}: {verdict['rule']}: {verdict['detail']}"
        for number, outcome in enumerate(outcomes, 1)
        for verdict in (outcome.get("admission") or {"verdicts": []})["verdicts"]
        if verdict["ok"] is False and (bench.is_gpu or verdict["rule"] not in DISTURBED)
    ]
    bench.report.check("trials that are not admitted", "none", "; ".join(broken)[:600] or "none", not broken)
    _compare_with_table(bench, runs)


def _compare_with_table(bench: Bench, runs: Path) -> None:
    """Compare each trial of the real search with the same configuration in the table."""
    ratios, memory, ends, best = [], [], [], min(row.get(STEP_TIME, np.inf) for row in bench.table.values())
    for folder in sorted((runs / "search" / "trials").iterdir()):
        if not (folder / "result.json").is_file():
            continue
        result = json.loads((folder / "result.json").read_text())
        row = bench.table.get(Config(json.loads((folder / "config.json").read_text())["config"]), {})
        if result["status"] == "ok" and row.get("status") == "ok":
            ratios.append(statistics.median(result["step_times_s"]) / row[STEP_TIME])
            ends.append(row[STEP_TIME] / best)
            if row[MEMORY]:
                memory.append(result["peak_memory_bytes"][0] / 2**30 / row[MEMORY])
    bench.report.check("trials that the table has too", "at least 1", str(len(ratios)), bool(ratios))
    bench.report.figures["trial over table, step time"] = ratios
    bench.report.figures["best so far over table's best, by trial"] = list(np.minimum.accumulate(ends))
    if bench.is_gpu and ratios:
        bench.report.check_close("median step time of trials over the table's", 1.0, statistics.median(ratios), 0.1)
        bench.report.check_close("median peak memory of trials over the table's", 1.0, statistics.median(memory), 0.03)
        within = "within 5 % of the table's best"
        bench.report.check("the search's best configuration", within, f"{min(ends):.3f} times", min(ends) <= 1.05)
