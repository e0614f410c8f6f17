"""Throughput of a server, from the result file of a load generator or from its request log."""

from __future__ import annotations

from pydantic import JsonValue

from cclsearch.trace.events import Reason
from cclsearch.trace.files.run_log import ServingLog
from cclsearch.trace.metric import Draft, NotAvailable, metric
from cclsearch.trace.view import TraceView


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
