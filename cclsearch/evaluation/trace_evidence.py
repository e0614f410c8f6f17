"""Read a trial's trace folder for the evidence of admission; the only place where a search uses `trace/`."""

from __future__ import annotations

from pathlib import Path

from cclsearch.card.model import Card
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line
from cclsearch.evaluation.traced_collectives import read_collectives
from cclsearch.evaluation.traced_origin import read_origins
from cclsearch.evaluation.traced_products import read_products
from cclsearch.launch.contract import TrialInput
from cclsearch.scoring.evidence import TraceEvidence
from cclsearch.trace.events import Reason, Status, TraceSet
from cclsearch.trace.read import read_traces
from cclsearch.trace.score import score_view
from cclsearch.trace.view import NO_TIMES, TraceView


def _require_times(traces: TraceSet) -> TraceSet:
    """Return the traces; execution traces count as unreadable."""
    # They have no times and so prove nothing.
    if all(table.is_timed for table in traces.tables.values()):
        return traces
    return TraceSet({}, Status.NOT_AVAILABLE, (Reason.NO_TIMES,), NO_TIMES, files=traces.files, folder=traces.folder)


def read_trace_evidence(folder: Path, card: Card, payload: TrialInput) -> TraceEvidence:
    """Return metrics and diagnosis of a trial's traces; unreadable ones are in the notes.

    The metrics are only those that cover the whole trace.
    """
    traces = _require_times(read_traces(folder))
    devices = {device.name for table in traces.tables.values() for device in table.devices if device.name}
    view = TraceView(traces, card=card, config=payload.config)
    score = score_view(view)
    whole = {name: result.value for name, result in score.metrics.items() if result.status is Status.OK}
    diagnosis = score.diagnosis
    return TraceEvidence(
        metrics={name: value for name, value in whole.items() if value is not None},
        ranks=score.ranks,
        step_time_s=score.value("trace_step_time"),
        products=read_products(view, card.precision),
        collectives=read_collectives(view),
        origins=read_origins(traces),
        backend=next(filter(None, (table.backend for table in traces.tables.values())), ""),
        format=next((f"{table.format} on {table.accelerator}" for table in traces.tables.values()), ""),
        devices=tuple(redact(one_line(name, 100)) for name in sorted(devices)),
        diagnosis=tuple(redact(one_line(text, 400)) for text in diagnosis.sentences) if diagnosis else (),
        seconds_by_cause={cause.value: s for cause, s in diagnosis.seconds_by_cause.items()}
        if diagnosis and diagnosis.is_step
        else {},
        notes=(redact(one_line(score.message)),) if score.message else (),
    )
