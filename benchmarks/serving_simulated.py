"""The simulation of continuous batching against the real small server: predicted and measured latencies of loads.

    python benchmarks/serving_simulated.py measure [--by-http] [--table benchmarks/serving_simulated.csv]
    python benchmarks/serving_simulated.py compare [--table benchmarks/serving_simulated.csv]

`measure` serves each of CASES and writes a row for each, resumable. It runs the real scheduler and the real model of
`cpu-serving` (launchers/), one step after the other. Its clock counts the processor seconds of each step relative to
those of a reference step that runs before each, which takes REFERENCE_S when nothing else runs: a machine that other
processes slow down changes both. With `--by-http` the run script serves over HTTP and wall time
counts; a case beside which other processes used more than DISTURBED_CORES is measured up to ATTEMPTS times, and the
least disturbed counts. `compare` calibrates the multipliers on the cases marked as known, and
prints predicted beside measured for the others, which the calibration has not seen.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.values import Config
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.tasks.base import task_of
from cclsearch.tasks.serving.contract import RequestRecord, ServingInput
from cclsearch.tasks.serving.measurements import measure_load
from cclsearch.tasks.serving.open_loop import Arrivals, serve_open
from cclsearch.tasks.serving.replica import read_replica
from cclsearch.tasks.serving.simulated_load import SimulatedLoad, Simulator
from cclsearch.tasks.serving.steady_state import serve
from cclsearch.tasks.serving.steps import MULTIPLIERS, LoadParts, compute_load

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "launchers" / "cpu_serving.py"
REPEATS = 2
"""Loads of a case on one server; the medians of their metrics count."""
WARM_UP = 8
"""Requests before the first load."""
DISTURBED_CORES, ATTEMPTS = 0.3, 3
REFERENCE_S, SMOOTHED = 0.003, 9
"""Seconds of a reference step on the quiet machine, and how many successive ones are averaged (the median)."""
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
MEANS = ("ttft_mean_s", "tpot_mean_s", "output_tokens_per_s")
"""Metrics that the multipliers are calibrated on: the closed form has no others."""
WIDE = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0])
"""Standard deviations of the log multipliers: wider than those of searches, since this machine is known by nothing; a
request has no way by HTTP here."""
ERROR = 0.05
TABLE = {
    "ttft_mean_s": "TTFT mean, s", "ttft_p50_s": "TTFT p50", "ttft_p99_s": "TTFT p99", "tpot_mean_s": "TPOT mean",
    "tpot_p99_s": "TPOT p99", "itl_p99_s": "ITL p99", "output_tokens_per_s": "tokens/s", "queue_mean_s": "queue, s",
    "tokens_per_step": "tokens a step", "preemptions": "preemptions", "kv_cache_use_peak": "KV cache, peak",
}  # fmt: skip
Predict = Callable[[Any, np.ndarray], Mapping[str, float]]


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
        "num_requests": max(48, 4 * clients),
        "input_len": given,
        "output_len": asked,
        **more,
    }


def rate(per_s: float, **more: Any) -> dict[str, Any]:
    return {"arrival": "poisson", "request_rate": per_s, "num_requests": 100, **more}


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
    Case("poisson-20", rate(20)),
    Case("poisson-40", rate(40)),
    Case("poisson-60", rate(60)),
    Case("poisson-50-whole-prompts", rate(50), {"chunked_prefill": False, "max_num_seqs": 16}),
    Case("poisson-150-too-many", rate(150)),
    Case("bursts-40", rate(40, arrival="gamma", burstiness=2.0)),
    Case("trace", {"arrival": "trace", "num_requests": 100}),
    Case(
        "trace-prefill-alone", {"arrival": "trace", "num_requests": 100}, {"chunked_prefill": False, "max_num_seqs": 16}
    ),
)


def write_trace(path: Path) -> None:
    """Write a trace in the format of Azure's: bursts, and lengths of prompts and answers that differ widely."""
    rng = np.random.default_rng(TRACE_SEED)
    when = np.cumsum(rng.gamma(0.4, 0.022 / 0.4, 150))
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


def measure_by_steps(case: Case) -> dict[str, float]:
    """The medians of the metrics of a case's loads, by the processor seconds of the real scheduler's steps."""
    import torch

    sys.path[:0] = [str(SCRIPT.parent)] if str(SCRIPT.parent) not in sys.path else []
    scheduler, model, loads = (
        importlib.import_module(name) for name in ("cpu_serving_scheduler", "cpu_serving_model", "serving_load")
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        card = make_card(case, Path(name))
        payload = make_payload(card, case)
    requests = [each.model_dump() for each in payload.requests]
    longest = max(each["input_tokens"] + each["output_tokens"] for each in requests)
    options = {**payload.config, "arch": payload.arch.model_dump(), "seed": 0, "max_len": longest, "threads": 1}
    found = []
    with torch.inference_mode():
        engine = scheduler.Scheduler(model.PagedModel(options), options)
        clock = StepClock(model, payload.arch.model_dump())
        for number in range(-1, REPEATS):  # the first warms up
            sent = requests if number >= 0 else requests[:WARM_UP]
            load = loads.Load(number, sent, payload.concurrency, 0, payload.shared_prefix_tokens)
            prompts = [
                loads.draw_prompt(load, n, each["input_tokens"], payload.arch.vocab_size) for n, each in enumerate(sent)
            ]
            records = serve_by_steps(scheduler, engine, load, prompts, clock)
            stats = engine.read_stats()
            started = {"queue_mean_s": float(np.mean([waited for _, waited in records]))}
            found.append({**stats, **measure_load([record for record, _ in records], 1.0, {}), **started})
    return {metric: float(np.median([each[metric] for each in found[1:]])) for metric in SHOWN if metric in found[0]}


class StepClock:
    """Times steps in units of a reference step: 16 answers with 64 tokens each go on by one."""

    def __init__(self, model: Any, arch: Mapping[str, Any]) -> None:
        options = {"arch": arch, "block_size": 16, "seed": 1, "max_len": 128, "kv_cache_mib": 8}
        self.model = model.PagedModel(options)
        self.chunks = [model.Chunk(None, [7], 63, list(range(4 * n, 4 * n + 4))) for n in range(16)]
        self.seen: deque[float] = deque(maxlen=SMOOTHED)

    def time(self, step: Callable[[], Any]) -> tuple[Any, float]:
        """What the step returns, and its seconds on the quiet machine."""
        begun = time.thread_time()
        self.model.forward(self.chunks)
        self.seen.append(time.thread_time() - begun)
        begun = time.thread_time()
        result = step()
        return result, (time.thread_time() - begun) / float(np.median(self.seen)) * REFERENCE_S


def serve_by_steps(
    scheduler: Any, engine: Any, load: Any, prompts: list[list[int]], clock: StepClock
) -> list[tuple[RequestRecord, float]]:
    """The record of each request, and its seconds in the queue, by a clock of the steps' processor seconds."""
    requests = load.requests
    arrival = [0.0 if load.concurrency else each["arrival_s"] for each in requests]
    unsent, now = list(range(len(requests))), 0.0
    due = [unsent.pop(0) for _ in range(min(load.concurrency or len(requests), len(requests)))]
    number_of: dict[Any, int] = {}
    waited: dict[int, float] = {}
    times: dict[int, list[float]] = {n: [] for n in range(len(requests))}
    while due or not engine.is_idle:
        for n in [n for n in due if arrival[n] <= now]:
            answer = scheduler.Answer(list(prompts[n]), requests[n]["output_tokens"], asyncio.Queue())
            number_of[answer] = n
            engine.waiting.append(answer)
            due.remove(n)
        if engine.is_idle:
            now = min(arrival[n] for n in due)
            continue
        known = set(map(id, engine.running))
        produced, seconds = clock.time(engine.step)
        for answer in {*engine.running, *(answer for answer, _ in produced)}:
            if id(answer) not in known:
                waited.setdefault(number_of[answer], now - arrival[number_of[answer]])
        now += seconds
        for answer, _ in produced:
            times[number_of[answer]].append(now)
            if answer.left == 0 and load.concurrency and unsent:
                arrival[unsent[0]] = now
                due.append(unsent.pop(0))
    return [
        (
            RequestRecord(
                number=n, arrival_s=arrival[n], sent_s=arrival[n], token_times_s=tuple(times[n]), end_s=times[n][-1],
                input_tokens=requests[n]["input_tokens"], output_tokens=requests[n]["output_tokens"],
            ),
            waited[n],
        )
        for n in range(len(requests))
    ]  # fmt: skip


def make_payload(card: Card, case: Case) -> ServingInput:
    """The `config.json` of a case."""
    config = Config({**USUAL, **case.knobs})
    payload = task_of(card).make_input(card, config, is_measured=True, run_id="benchmark", trial=1, seed=0)
    assert isinstance(payload, ServingInput)
    return payload


def measure_by_http(case: Case) -> dict[str, float]:
    """The medians of the metrics of a case's loads, and the cores that other processes used meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        card = make_card(case, folder)
        payload = make_payload(card, case)
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


def measure_all(table: Path, *, by_http: bool) -> None:
    """Measure the cases that the table lacks."""
    known = read_table(table)
    for case in CASES:
        if case.name in known:
            continue
        if not by_http:
            append(table, case.name, measure_by_steps(case))
            continue
        tries: list[dict[str, float]] = []
        while len(tries) < ATTEMPTS and min((each["foreign_cores"] for each in tries), default=9.0) > DISTURBED_CORES:
            tries.append(measure_by_http(case))
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
    print(name, " ".join(f"{metric}={value:.4g}" for metric, value in found.items()), flush=True)


def read_case(case: Case) -> tuple[Card, Space, SimulatedLoad]:
    """The card of a case, its configuration as a space of one row, and its requests."""
    with tempfile.TemporaryDirectory() as name:
        card = make_card(case, Path(name))
        payload = make_payload(card, case)
    space = space_from_rows(tuple(Knob(k, (v,)) for k, v in payload.config.items()), [dict(payload.config)])
    return card, space, SimulatedLoad(payload.requests, payload.concurrency, {})


def simulate(asked: tuple[Card, Space, SimulatedLoad], theta_P: np.ndarray) -> dict[str, float]:
    """What the simulation predicts."""
    card, space, load = asked
    found = Simulator.read(card, read_replica(card, space)).run(load, theta_P)
    return {metric: float(values[0]) for metric, values in found.items()}


def predict_closed(asked: tuple[Card, Space, SimulatedLoad], theta_P: np.ndarray) -> dict[str, float]:
    """What the closed form predicts of the means."""
    card, space, load = asked
    given, answer = (
        float(np.mean([getattr(r, name) for r in load.requests])) for name in ("input_tokens", "output_tokens")
    )
    at = read_replica(card, space)
    if load.clients is not None:
        served = serve(compute_load(card, at, float(load.clients), given, answer), theta_P)
    else:
        times = np.array([r.arrival_s for r in load.requests])
        gaps = np.diff(times)
        arrivals = Arrivals(1 / float(gaps.mean()), float(gaps.std() / gaps.mean()), len(times))
        levels = [compute_load(card, at, float(n), given, answer) for n in (1, 2, 4, 8, 16, 32)]
        names = LoadParts.__dataclass_fields__
        stacked = LoadParts(**{name: np.stack([getattr(each, name) for each in levels]) for name in names})
        served = serve_open(stacked, theta_P, arrivals)
    return {
        "ttft_mean_s": float(served.ttft_s[0]),
        "tpot_mean_s": float(served.tpot_s[0]),
        "output_tokens_per_s": float(1 / served.cost[0]),
    }


def calibrate(predict: Predict, known: Sequence[tuple[Any, Mapping[str, float]]]) -> np.ndarray:
    """The log multipliers with which the predictions of the known cases are nearest, and near the prior."""

    def residuals(theta_P: np.ndarray) -> np.ndarray:
        found = [theta_P / WIDE]
        for asked, measured in known:
            predicted = predict(asked, theta_P)
            found.append(np.array([np.log(predicted[m] / measured[m]) / ERROR for m in MEANS]))
        return np.concatenate(found)

    return np.asarray(least_squares(residuals, np.zeros(len(MULTIPLIERS)), diff_step=0.02, max_nfev=40).x)


def compare(table: Path) -> None:
    """Print predicted beside measured, of the cases that the calibration did not see."""
    measured = read_table(table)
    cases = [(case, read_case(case)) for case in CASES if case.name in measured]
    thetas = {}
    for name, predict in (("simulation", simulate), ("closed form", predict_closed)):
        known = [(asked, measured[case.name]) for case, asked in cases if case.is_known]
        thetas[name] = calibrate(predict, known)
        told = ", ".join(f"{n} {np.exp(v):.2f}" for n, v in zip(MULTIPLIERS, thetas[name], strict=True))
        print(f"multipliers of the {name}, by {len(known)} loads: {told}")
    print("\n| load | " + " | ".join(f"{label}: measured, simulated" for label in TABLE.values()) + " |")
    print("| --- |" + " --- |" * len(TABLE))
    errors: dict[str, dict[str, list[float]]] = {"simulation": {}, "closed form": {}}
    for case, asked in cases:
        found = simulate(asked, thetas["simulation"])
        closed = predict_closed(asked, thetas["closed form"])
        if not case.is_known:
            for name, predicted in (("simulation", found), ("closed form", closed)):
                for metric in {*MEANS, *TABLE} & set(predicted) & set(measured[case.name]):
                    value = measured[case.name][metric]
                    if value > 0 and predicted[metric] > 0:
                        errors[name].setdefault(metric, []).append(float(np.log(predicted[metric] / value)))
        cells = " | ".join(_show(measured[case.name].get(metric), found.get(metric)) for metric in TABLE)
        print(f"| {case.name}{' (known)' if case.is_known else ''} | {cells} |")
    for name, by_metric in errors.items():
        told = ", ".join(f"{m} {np.expm1(np.median(np.abs(e))):.0%}" for m, e in sorted(by_metric.items()))
        print(f"\nmedian error of the {name} over the loads that it was not calibrated on: {told}")


def _show(measured: float | None, predicted: float | None) -> str:
    return " / ".join("-" if value is None else f"{value:.3g}" for value in (measured, predicted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "compare"))
    parser.add_argument("--by-http", action="store_true")
    parser.add_argument("--table", type=Path, default=Path(__file__).with_suffix(".csv"))
    args = parser.parse_args()
    if args.what == "measure":
        measure_all(args.table, by_http=args.by_http)
    else:
        compare(args.table)


if __name__ == "__main__":
    main()
