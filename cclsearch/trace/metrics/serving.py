"""Latency and throughput of a server: from the request log or a load generator's result, else from step markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from pydantic import JsonValue

from cclsearch.trace.events import DEVICE_WORK, Reason
from cclsearch.trace.files.run_log import RunLog, ServingLog
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.names.kinds import read_marker
from cclsearch.trace.result import if_available
from cclsearch.trace.view import RankView, TraceView


@dataclass(frozen=True)
class Batch:
    """One engine step: the number of prefilled and of decoded requests, and its time."""

    num_prefill: int
    num_decode: int
    start_ns: int
    """Start on the host; on the device if only its timeline marks steps."""
    device_start_ns: int
    end_ns: int
    """End on the device."""


def find_batches(view: RankView) -> list[Batch]:
    """Return the engine steps with counts of requests, in order; each ends with the last device event it launched."""
    table = view.table
    rows = view.rows(*DEVICE_WORK)
    starts = np.full(len(table.steps) + 1, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(starts, table.step_id[rows], table.ts_ns[rows])
    ends = np.full(len(table.steps) + 1, -1, dtype=np.int64)
    np.maximum.at(ends, table.step_id[rows], table.ts_ns[rows] + table.dur_ns[rows])
    found = []
    for i, step in enumerate(table.steps):
        marker = read_marker(step.name)
        if marker is not None and marker.has_counts and ends[i] >= 0:
            start = starts[i] if table.step_source == "gpu_annotation" else step.start_ns
            counts = marker.num_prefill or 0, marker.num_decode or 0
            found.append(Batch(*counts, int(start), int(starts[i]), int(ends[i])))
    return found


def _from_log(seconds: Sequence[float], of: str) -> Draft:
    """Return the median over requests, with percentiles in `inputs`."""
    inputs: dict[str, JsonValue] = {f"p{p}_s": float(np.percentile(seconds, p)) for p in (50, 90, 99)}
    inputs["num_requests"] = len(seconds)
    return Draft(float(np.median(seconds)), {}, detail=f"{of}, from the request log", inputs=inputs)


def _from_summary(log: RunLog, key: str, of: str) -> Draft:
    """Return the median that a load generator computed; `inputs` has its other statistics."""
    summary = log.summaries[key]
    inputs: dict[str, JsonValue] = {**summary.others}
    if log.serving is not None and log.serving.num_requests:
        inputs["num_requests"] = log.serving.num_requests
    return Draft(summary.median_s, {}, detail=f"{of}, median as written in {summary.source}", inputs=inputs)


def _require_batches(trace: TraceView) -> dict[int, list[Batch]]:
    card = trace.card
    phase = if_available(lambda: card.phase) if card is not None else None
    if card is not None and phase is not None and phase != "inference":
        raise NotAvailable(Reason.PHASE_MISMATCH, f"the card is for {card.task}, not for inference")
    found = {rank: batches for rank, view in trace.ranks.items() if (batches := find_batches(view))}
    if not found:
        raise NotAvailable(Reason.NO_STEP_MARKERS, "no step marker separates prefill from decode")
    return found


def _slowest_median(values: dict[int, list[int]], mixed: int, what: str, detail: str = "") -> Draft:
    medians: dict[int, float | None] = {rank: float(np.median(ns)) / 1e9 if ns else None for rank, ns in values.items()}
    found = [value for value in medians.values() if value is not None]
    if not found:
        raise NotAvailable(Reason.NO_STEP_MARKERS, f"no step only {what}")
    count = min(len(ns) for ns in values.values() if ns)
    return Draft(
        max(found),
        medians,
        n_steps=count,
        reason=Reason.TOO_FEW_STEPS if count < 2 else None,
        detail=f"{detail}{'; ' if detail else ''}from the engine's step markers, not from a request log",
        inputs={"num_mixed_steps": mixed},
    )


@metric("ttft", unit="s", better="lower", over="trace")
def measure_ttft(trace: TraceView) -> Draft:
    """Time to first token: from the request log, else the time of a prefill-only step. Median over the requests of the
    log; prefill-only steps count from host start to device end, slowest rank, which does not include queueing."""
    log = trace.trace_set.run_log
    if log is not None and log.ttft_s:
        return _from_log(log.ttft_s, "includes queueing")
    if log is not None and "ttft" in log.summaries:
        return _from_summary(log, "ttft", "includes queueing")
    batches = _require_batches(trace)
    values = {
        rank: [b.end_ns - b.start_ns for b in found if b.num_prefill and not b.num_decode]
        for rank, found in batches.items()
    }
    return _slowest_median(values, _count_mixed(batches), "prefills")


@metric("tpot", unit="s", better="lower", over="trace")
def measure_tpot(trace: TraceView) -> Draft:
    """Time per output token: from the request log, else the time of a decode-only step. Median over the requests of the
    log; decode-only steps, slowest rank, count from device end to device end of the decode-only step before. Without
    two such steps in a row, a step counts from its first device event to its last."""
    log = trace.trace_set.run_log
    if log is not None and log.tpot_s:
        return _from_log(log.tpot_s, "mean gap between a request's tokens")
    if log is not None and "tpot" in log.summaries:
        return _from_summary(log, "tpot", "mean gap between a request's tokens")
    batches = _require_batches(trace)
    periods = {rank: _decode_periods(found) for rank, found in batches.items()}
    if any(periods.values()):
        return _slowest_median(periods, _count_mixed(batches), "decodes")
    extents = {
        rank: [b.end_ns - b.device_start_ns for b in found if _only_decodes(b)] for rank, found in batches.items()
    }
    return _slowest_median(
        extents, _count_mixed(batches), "decodes", "device work of a step, without host time before it"
    )


def _decode_periods(batches: Sequence[Batch]) -> list[int]:
    """Return the ns from the device end of a decode-only step to the end of the next step, if it only decodes too."""
    return [
        after.end_ns - before.end_ns
        for before, after in pairwise(batches)
        if _only_decodes(before) and _only_decodes(after)
    ]


def _only_decodes(batch: Batch) -> bool:
    return batch.num_decode > 0 and not batch.num_prefill


def _count_mixed(batches: dict[int, list[Batch]]) -> int:
    return sum(bool(b.num_prefill and b.num_decode) for found in batches.values() for b in found)


def _require_log(trace: TraceView) -> ServingLog:
    log = trace.trace_set.run_log
    if log is None or log.serving is None:
        raise NotAvailable(
            Reason.NO_TRACE_FILES,
            "needs a load generator's result (vLLM's or SGLang's benchmark) or a request log next to the traces",
        )
    return log.serving


def _draft(log: ServingLog, value: float | None, what: str) -> Draft:
    if value is None:
        raise NotAvailable(Reason.FORMAT_UNSUPPORTED, f"{log.source} does not record {what}")
    inputs: dict[str, JsonValue] = {
        "duration_s": log.duration_s,
        "num_requests": log.num_requests,
        "output_tokens": log.output_tokens,
        "input_tokens": log.input_tokens,
    }
    return Draft(value, n_ranks=0, detail=f"from {log.source}", inputs=inputs, needs_steps=False)


@metric("output_tokens_per_s", unit="tokens/s", better="higher", over="trace", needs_times=False)
def measure_output_tokens_per_s(trace: TraceView) -> Draft:
    """Generated tokens of all requests per second of the load, from the load generator's result or the request log."""
    log = _require_log(trace)
    return _draft(log, log.output_tokens_per_s, "output tokens and their time")


@metric("requests_per_s", unit="requests/s", better="higher", over="trace", needs_times=False)
def measure_requests_per_s(trace: TraceView) -> Draft:
    """Completed requests per second of the load, from the load generator's result or the request log."""
    log = _require_log(trace)
    return _draft(log, log.requests_per_s, "completed requests and their time")
