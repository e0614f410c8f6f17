"""Metrics of serving and inference, computed from the request log; `docs/serving.md` defines each of them.

Percentiles interpolate linearly between the two nearest values (type 7 of Hyndman and Fan, numpy's default).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cclsearch.core.metrics import NUM_ACCELERATORS, Direction, MetricInfo
from cclsearch.scoring.catalog import ENERGY, HEADROOM, MEMORY, NO_ENERGY, SIZE, result_metric
from cclsearch.tasks.serving.contract import RequestRecord
from cclsearch.tasks.serving.settling import KEPT_UP, find_kept_share

_LOW, _HIGH = Direction.MINIMIZE, Direction.MAXIMIZE
_NO_REQUESTS = "no request was measured, or the source does not state it"


def _count(name: str, unit: str, label: str, direction: Direction = _HIGH, **more: Any) -> MetricInfo:
    """Return a metric that follows from the request log."""
    return result_metric(name, unit, direction, _NO_REQUESTS, label=label, **more)


def _report(name: str, unit: str, what: str, label: str, direction: Direction = _LOW, **more: Any) -> MetricInfo:
    """Return a metric that only the server knows."""
    return result_metric(name, unit, direction, f"the server reports no {what}", label=label, **more)


LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between tokens",
    "e2e": "time of a request",
}
STATISTICS = {"mean": "mean", "p50": "median", "p90": "90th percentile", "p99": "99th percentile"}
PERCENTS = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
THROUGHPUT = "output_tokens_per_s_per_accelerator"
"""The primary metric of both tasks."""
GOODPUT = "goodput_requests_per_s"

LATENCY_METRICS = tuple(
    _count(
        f"{name}_{statistic}_s", "s", f"{words}, {of}", _LOW,
        heading=f"{name if name == 'e2e' else name.upper()} {statistic} (s)", is_positive=name != "itl",
    )
    for name, words in LATENCIES.items()
    for statistic, of in STATISTICS.items()
)  # fmt: skip
SERVER_METRICS = (
    _report("kv_cache_use_peak", "fraction", "use of its KV cache", "peak KV cache use", is_positive=False),
    _report("kv_cache_tokens", "tokens", "size of its KV cache", "KV cache size", _HIGH),
    _report("preemptions", "requests", "preemptions", "preempted requests", is_positive=False),
    _report("queue_mean_s", "s", "time in its queue", "time in the queue, mean", is_positive=False),
    _report("tokens_per_step", "tokens", "steps", "tokens computed in a step, mean", _HIGH),
    _report("prefix_cache_hit_rate", "fraction", "prefix cache", "prompt tokens from the prefix cache", _HIGH,
            is_positive=False),
)  # fmt: skip
LOAD_METRICS: tuple[MetricInfo, ...] = (
    _count(THROUGHPUT, "tokens/s", "output tokens/s per accelerator", heading="tokens/s per accel."),
    _count("output_tokens_per_s", "tokens/s", "output tokens/s"),
    _count("total_tokens_per_s", "tokens/s", "tokens/s, prompts included"),
    _count("output_tokens_per_s_per_user", "tokens/s", "output tokens/s per user"),
    _count("requests_per_s", "requests/s", "requests/s"),
    _count(GOODPUT, "requests/s", "requests/s within the targets", is_positive=False),
    _count("accelerator_seconds_per_mtoken", "accelerator-s/Mtoken", "accelerator time per output token", _LOW),
    *LATENCY_METRICS,
    result_metric("concurrency", "requests", _HIGH, "the load has no fixed concurrency", label="concurrency"),
    *SERVER_METRICS,
)
SERVED = result_metric(
    "served_fraction", "fraction", _HIGH, "the load has no rate, or too few requests",
    label="share of the arriving requests that it keeps up with", heading="kept up",
)  # fmt: skip
"""Of requests that arrive at a rate (`settling.py`)."""
OTHER_LOAD = "other_load_"
"""Begins the names of metrics of the second load."""
OTHER_LOAD_METRICS = tuple(
    metric.model_copy(
        update={
            "name": OTHER_LOAD + metric.name,
            "label": f"{metric.label}, second load",
            "heading": "",
            "missing": "the card has no second load (`other_concurrency` or `other_request_rate`)",
        }
    )
    for metric in LOAD_METRICS
    if metric.name in (THROUGHPUT, GOODPUT, "ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s", "e2e_mean_s")
)
COLUMNS = {
    **{f"{name}_s": f"{name}_mean_s" for name in LATENCIES},
    "tok_s_per_user": "output_tokens_per_s_per_user",
    "output_tok_s_per_gpu_est": THROUGHPUT,
    "output_tok_s_est": "output_tokens_per_s",
    "output_tok_s": "output_tokens_per_s",
    "total_tok_s": "total_tokens_per_s",
    "req_s": "requests_per_s",
    "latency_s": "batch_latency_s",
    "num_gpus": NUM_ACCELERATORS,
    "num_devices": NUM_ACCELERATORS,
}
"""Columns of published tables (aiconfigurator's, GPUStack's, LLM-Inference-Bench's) -> metric."""
BATCH_LATENCY = _count("batch_latency_s", "s", "time of a batch", _LOW, short="batch")
ENERGY_METRICS = (
    ENERGY,
    result_metric("energy_j_per_mtoken", "J/Mtoken", _LOW, NO_ENERGY, label="energy per token", needs=ENERGY.needs),
    result_metric("power_w", "W", _LOW, NO_ENERGY, label="power", needs=ENERGY.needs),
)
"""Metrics of a load; a token is one of an answer."""
REPORTED = (ENERGY.name, *(metric.name for metric in SERVER_METRICS))
"""Metrics of a load that a run script states itself: the request log does not show them."""
GENERAL = (SIZE, MEMORY, HEADROOM, *ENERGY_METRICS)
LIMITED = frozenset(metric.name for metric in (*LOAD_METRICS, BATCH_LATENCY))
"""Metrics of a load that a limit may bound."""
Bounds = tuple[float | None, float | None]
"""The least and the greatest value."""


def measure_load(
    records: Sequence[RequestRecord], num_accelerators: float, targets: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of the measured requests of one load; only of those that were answered, and none if none was."""
    answered = [r for r in records if not r.is_warm_up and not r.error and r.output_tokens and r.token_times_s]
    if not answered:
        return {}
    window_s = max(r.end_s for r in answered) - min(r.arrival_s for r in answered)
    if window_s <= 0:
        return {}
    given, output = sum(r.input_tokens for r in answered), sum(r.output_tokens for r in answered)
    metrics: dict[str, float] = {
        **find_rates(len(answered), given, output, window_s, num_accelerators),
        GOODPUT: count_good(answered, targets) / window_s,
        "batch_latency_s": window_s,
    }
    for name, values in find_latencies(answered).items():
        if len(values):
            metrics |= summarize(name, values)
    if metrics.get("tpot_mean_s"):
        metrics["output_tokens_per_s_per_user"] = 1 / metrics["tpot_mean_s"]
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def measure_settling(records: Sequence[RequestRecord]) -> dict[str, float]:
    """`SERVED` of the measured requests of a load with a rate; empty if there are too few."""
    sent = [r for r in records if not r.is_warm_up]
    firsts = [next(iter(r.token_times_s), math.inf) for r in sent]
    ends = [math.inf if r.error else r.end_s for r in sent]
    kept = find_kept_share(np.array([r.arrival_s for r in sent]), np.array(firsts), np.array(ends))
    return {SERVED.name: kept} if math.isfinite(kept) else {}


def describe_settling(metrics: Mapping[str, float], ended_s: float | None) -> list[str]:
    """Return a sentence on a load that the server does not keep up with; none if it does."""
    kept, ended = (
        metrics.get(SERVED.name, 1.0),
        "" if ended_s is None else f"; the load was ended after {ended_s:.3g} s",
    )
    if kept >= KEPT_UP:
        return []
    return [f"the load does not settle: the server keeps up with {kept:.0%} of the arriving requests{ended}"]


def find_rates(
    num_requests: int, input_tokens: int, output_tokens: int, window_s: Any, num_accelerators: Any
) -> dict[str, Any]:
    """Return the rates of requests that were answered in so many seconds; numbers, or arrays over configurations."""
    rate = output_tokens / window_s
    return {
        THROUGHPUT: rate / num_accelerators,
        "output_tokens_per_s": rate,
        "total_tokens_per_s": (input_tokens + output_tokens) / window_s,
        "requests_per_s": num_requests / window_s,
        "accelerator_seconds_per_mtoken": num_accelerators / rate * 1e6,
    }


def derive_energy(metrics: Mapping[str, float]) -> dict[str, float]:
    """Energy per token and power of a load with known energy and throughput; else empty."""
    energy_j, tokens_per_s = metrics.get(ENERGY.name, 0.0), metrics.get("output_tokens_per_s")
    window_s = metrics.get("batch_latency_s")
    if not 0 < energy_j < math.inf or not tokens_per_s or not window_s:
        return {}
    return {"energy_j_per_mtoken": energy_j / (tokens_per_s * window_s) * 1e6, "power_w": energy_j / window_s}


def find_latencies(answered: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Latency -> its values: of each request; for `itl`, of each pair of successive tokens with known times."""
    each = [_of_request(record) for record in answered]
    return {name: [value for own in each for value in own[name]] for name in LATENCIES}


def summarize(name: str, values: Any, axis: int | None = None) -> dict[str, Any]:
    """Mean and percentiles, by the names of their metrics: numbers, or arrays without that axis."""
    found = (np.mean(values, axis), *np.percentile(values, list(PERCENTS.values()), axis))
    return {f"{name}_{statistic}_s": value for statistic, value in zip(STATISTICS, found, strict=True)}


def count_good(answered: Sequence[RequestRecord], targets: Mapping[str, float]) -> int:
    """Count the requests that keep every target by themselves (target: greatest value of a latency, in seconds)."""
    return sum(
        all(value <= targets[name] for name, own in _of_request(record).items() if name in targets for value in own)
        for record in answered
    )


def find_excess(metrics: Mapping[str, float], limits: Mapping[str, Bounds]) -> float:
    """Return the excess of a load over the limits, each relative to its bound; infinite without a limited metric."""
    total = 0.0
    for metric, (least, most) in limits.items():
        value = metrics.get(metric)
        if value is None:
            return math.inf
        over = 0.0 if most is None else (value - most) / (abs(most) or 1.0)
        under = 0.0 if least is None else (least - value) / (abs(least) or 1.0)
        total += max(0.0, over, under)
    return total


def choose_load(
    loads: Sequence[Mapping[str, float]], limits: Mapping[str, Bounds], most: str = THROUGHPUT
) -> int | None:
    """Return the load that counts: most of a metric within the limits, else the least excess; None without a load."""
    measured = [n for n, metrics in enumerate(loads) if THROUGHPUT in metrics]
    return min(measured, key=lambda n: (find_excess(loads[n], limits), -loads[n].get(most, 0.0)), default=None)


def _of_request(record: RequestRecord) -> dict[str, list[float]]:
    times, others = record.token_times_s, record.output_tokens - 1
    return {
        "ttft": [times[0] - record.arrival_s],
        "tpot": [(times[-1] - times[0]) / others] if others else [],
        "itl": np.diff(times).tolist() if len(times) == record.output_tokens else [],
        "e2e": [record.end_s - record.arrival_s],
    }
