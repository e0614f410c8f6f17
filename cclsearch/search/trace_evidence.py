"""From a trial's trace folder to the evidence that admission needs; the only place where a search uses `trace/`."""

from __future__ import annotations

from pathlib import Path

from cclsearch.card.model import Card
from cclsearch.core.redact import redact
from cclsearch.core.text import one_line
from cclsearch.launch.contract import TrialInput
from cclsearch.score.evidence import TraceEvidence
from cclsearch.trace.metric import MetricResult, Status
from cclsearch.trace.read import read_traces
from cclsearch.trace.score import TraceScore, score_traces


def read_trace_evidence(folder: Path, card: Card, payload: TrialInput) -> TraceEvidence | None:
    """Return metrics and diagnosis of a trial's traces, or None if it writes none; unreadable ones are in the notes.

    The metrics are only those that cover the whole trace.
    """
    if not payload.wants_traces:
        return None
    traces = read_traces(folder)
    devices = {device.name for table in traces.tables.values() for device in table.devices if device.name}
    score = score_traces(traces, card=card, config=payload.config)
    whole = {name: result.value for name, result in score.metrics.items() if result.status is Status.OK}
    diagnosis = score.diagnosis
    return TraceEvidence(
        metrics={name: value for name, value in whole.items() if value is not None},
        ranks=score.ranks,
        step_time_s=score.value("trace_step_time"),
        flops_per_step=_flops_per_step(score.metrics.get("gemm_tflops")),
        flops_coverage=_flops_coverage(score),
        devices=tuple(redact(one_line(name, 100)) for name in sorted(devices)),
        diagnosis=tuple(redact(one_line(text, 400)) for text in diagnosis.sentences) if diagnosis else (),
        seconds_by_cause={cause.value: s for cause, s in diagnosis.seconds_by_cause.items()}
        if diagnosis and diagnosis.is_step
        else {},
        notes=(redact(one_line(score.message)),) if score.message else (),
    )


def _flops_per_step(result: MetricResult | None) -> float | None:
    """FLOPs of one step over all ranks; None unless every matrix product of whole steps has its shapes recorded."""
    if result is None or result.status is not Status.OK or not result.n_steps:
        return None
    flops = result.inputs.get("flops")
    return float(flops) / result.n_steps if isinstance(flops, int | float) else None


def _flops_coverage(score: TraceScore) -> float | None:
    """Share of all ranks' compute time in matrix products with recorded shapes; None if it is unknown."""
    result = score.metrics.get("gemm_tflops")
    compute_frac, step_s = score.value("compute_frac"), score.value("trace_step_time")
    if result is None or not result.n_steps or not compute_frac or not step_s or not score.ranks:
        return None
    kernel_s = result.inputs.get("kernel_s")
    if not isinstance(kernel_s, int | float):
        return None
    return min(1.0, float(kernel_s) / result.n_steps / (compute_frac * step_s * len(score.ranks)))
