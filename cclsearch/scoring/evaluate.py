"""Evaluate a finished trial: metrics, admission and loss."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import replace
from typing import Any, Protocol

from cclsearch.core.errors import TrialError
from cclsearch.core.metrics import PEAK_MEMORY, MetricInfo
from cclsearch.core.values import Failure, FailureKind, Provenance, Stage
from cclsearch.launch.contract import RunStatus, TrialInput, TrialResult
from cclsearch.scoring.admission import admit, check_load
from cclsearch.scoring.agreement import Agreement
from cclsearch.scoring.evidence import Diagnosed, Evidence, TraceEvidence
from cclsearch.scoring.objective import Objective
from cclsearch.scoring.outcome import CONSTRAINTS_RULE, EARLY_STOP_RULE, Admission, Outcome, Verdict
from cclsearch.scoring.trial_metric import derive_by_code

_MAX_FLOAT = sys.float_info.max


class JudgingTask(Protocol):
    """The part of `cclsearch.tasks.base.Task` that evaluates its trials; see there."""

    primary: str
    admission_rules: tuple[Callable[[Any], Verdict], ...]
    work_rules: Collection[str]
    agreement: Agreement | None

    @property
    def primary_metric(self) -> MetricInfo: ...
    def find_failure(self, result: TrialResult) -> Failure | None: ...
    def measure(self, evidence: Evidence) -> tuple[dict[str, float], float | None]: ...
    def diagnose(self, evidence: Evidence) -> Diagnosed: ...
    def list_loads(self, evidence: Evidence) -> list[dict[str, float]]: ...
    def saved_s(self, payload: TrialInput, result: TrialResult, primary: float) -> float: ...


def evaluate_evidence(
    evidence: Evidence, task: JudgingTask, objective: Objective, *, baseline: Mapping[str, float] | None = None
) -> Outcome:
    """Return the outcome of a run with a `result.json`; `task` is the card's, which measures and has the rules.

    `baseline` has the baseline trial's metrics if the objective `needs_baseline`; None means that this trial is the
    baseline. Raises nothing: a trial that cannot be scored gets an outcome with a failure.
    """
    failure = _find_reported_failure(evidence.result) or task.find_failure(evidence.result)
    metrics, spread = ({}, None) if failure else task.measure(evidence)
    failure = failure or _check_primary(task.primary, metrics, evidence.result) or _check_spread(spread)
    if failure is not None:
        return evaluate_failure(failure, evidence.provenance, evidence.result)
    trace, diagnosed = evidence.trace, task.diagnose(evidence)
    metrics, left_out = _drop_not_finite(metrics)
    by_code, failed = derive_by_code(metrics, evidence.payload.config, evidence.card)
    metrics, left_out = {**metrics, **by_code}, (*left_out, *failed)
    if evidence.result.status is RunStatus.PRUNED:
        return _evaluate_pruned(replace(evidence, metrics=metrics, spread=spread), task, left_out)
    admission = admit(replace(evidence, metrics=metrics, spread=spread), task.admission_rules)
    is_valid = admission.admitted
    loss, failure, admission = _score(objective, metrics, baseline, admission)
    return Outcome(
        provenance=evidence.provenance,
        failure=failure or _find_work_mismatch(admission, task.work_rules),
        admission=admission,
        loss=loss if admission.admitted and failure is None else None,
        metrics=metrics,
        loads=tuple(_drop_not_finite(load)[0] for load in task.list_loads(evidence)),
        violation=min(objective.violation(metrics), _MAX_FLOAT) if is_valid and failure is None else 0.0,
        spread=spread,
        fingerprint=task.agreement.read(evidence.payload, evidence.result) if task.agreement else (),
        notes=(*_collect_notes(evidence.result, trace), *left_out),
        diagnosis=diagnosed.sentences,
        seconds_by_cause=_drop_not_finite(diagnosed.seconds_by_cause)[0],
        attempt=evidence.attempt,
        trace_digests=trace.digests if trace else (),
    )


def evaluate_failure(failure: Failure, provenance: Provenance, result: TrialResult | None = None) -> Outcome:
    """The outcome of a failed trial; a peak memory that it measured is kept."""
    metrics = {}
    if result and result.peak_memory_bytes:
        metrics[PEAK_MEMORY] = max(result.peak_memory_bytes) / 2**30
    return Outcome(provenance=provenance, failure=failure, metrics=metrics)


def _evaluate_pruned(evidence: Evidence, task: JudgingTask, notes: tuple[str, ...]) -> Outcome:
    """Return the outcome of a trial that ended early: not ranked, but the surrogate learns from its measurements."""
    payload, result, limit = evidence.payload, evidence.result, evidence.payload.stop_above
    value, primary = evidence.metrics[task.primary], task.primary_metric
    if limit is None or value <= limit:
        why = "nothing allowed it to" if limit is None else f"its {primary.words} of {value:g} is not above {limit:g}"
        message = f"the run script ended early, although {why}"
        return evaluate_failure(
            Failure(stage=Stage.SCORE, kind=FailureKind.CRASHED, message=message), evidence.provenance, result
        )
    detail = (
        f"ended early: its first measurements, {value:.4g} {primary.unit or ''}, are above the limit of {limit:.4g}:"
        " it is not as fast as the best so far"
    )
    verdicts = (check_load(evidence), Verdict(rule=EARLY_STOP_RULE, ok=False, detail=detail))
    return Outcome(
        provenance=evidence.provenance,
        admission=Admission(admitted=False, verdicts=verdicts),
        metrics=dict(evidence.metrics),
        spread=evidence.spread,
        saved_s=max(0.0, task.saved_s(payload, result, value)),
        notes=(*_collect_notes(result, None), *notes),
        attempt=evidence.attempt,
    )


def replace_verdict(
    outcome: Outcome, verdict: Verdict, objective: Objective, baseline: Mapping[str, float] | None
) -> Outcome:
    """The outcome of an evaluated trial with this verdict instead of its former one of the same rule, if any."""
    assert outcome.admission is not None, "an evaluated trial has verdicts"
    rules = (verdict.rule, CONSTRAINTS_RULE)
    verdicts = (*(each for each in outcome.admission.verdicts if each.rule not in rules), verdict)
    admission = Admission(admitted=all(each.ok is not False for each in verdicts), verdicts=verdicts)
    is_valid = admission.admitted
    loss, failure, admission = _score(objective, outcome.metrics, baseline, admission)
    failure = outcome.failure or failure
    changes = {
        "admission": admission,
        "failure": failure,
        "loss": loss if admission.admitted and failure is None else None,
        "violation": min(objective.violation(outcome.metrics), _MAX_FLOAT) if is_valid and failure is None else 0.0,
    }
    return outcome.model_copy(update=changes)


def _find_reported_failure(result: TrialResult) -> Failure | None:
    if result.status is not RunStatus.FAILED:
        return None
    message = "the run script reported a failure without a reason"
    return result.failure or Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message=message)


def _check_primary(primary: str, metrics: Mapping[str, float], result: TrialResult) -> Failure | None:
    value = metrics.get(primary, result.metrics.get(primary))
    if value is not None and 0 < value < math.inf:
        return None
    found = "there is none" if value is None else f"it is {value:g}"
    message = f"the run script reported success, but its {primary} must be finite and above 0: {found}"
    return Failure(stage=Stage.SCORE, kind=FailureKind.CRASHED, message=message)


def _check_spread(spread: float | None) -> Failure | None:
    if spread is None or math.isfinite(spread):
        return None
    message = "the spread of the measurements of the run is beyond what a number can hold"
    return Failure(stage=Stage.SCORE, kind=FailureKind.CRASHED, message=message)


def _drop_not_finite(figures: Mapping[str, float]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the finite figures, and a note on each other one."""
    # Finite measurements may be too large for the figures that follow from them.
    notes = tuple(
        f"{name} would be {value} and was left out" for name, value in figures.items() if not math.isfinite(value)
    )
    return {name: value for name, value in figures.items() if math.isfinite(value)}, notes


def _score(
    objective: Objective, metrics: Mapping[str, float], baseline: Mapping[str, float] | None, admission: Admission
) -> tuple[float | None, Failure | None, Admission]:
    """Loss, failure, and the admission with the verdict on the objective's constraints appended."""
    reference = (metrics if baseline is None else baseline) if objective.needs_baseline else None
    try:
        loss = objective.loss(metrics, reference)
        objective.values(metrics)
        broken = objective.broken_constraints(metrics)
    except TrialError as error:
        return None, error.failure, admission
    if not math.isfinite(loss):
        message = f"the objective's value is {loss}: a measurement is beyond what can be compared"
        return None, Failure(stage=Stage.SCORE, kind=FailureKind.CRASHED, message=message), admission
    if not objective.constraints:
        return loss, None, admission
    kept = Verdict(rule=CONSTRAINTS_RULE, ok=not broken, detail="; ".join(broken) or "all satisfied")
    verdicts = (*admission.verdicts, kept)
    return loss, None, Admission(admitted=admission.admitted and not broken, verdicts=verdicts)


def _find_work_mismatch(admission: Admission, work_rules: Container[str]) -> Failure | None:
    broken = [verdict.detail for verdict in admission.verdicts if verdict.rule in work_rules and verdict.ok is False]
    if not broken:
        return None
    return Failure(stage=Stage.SCORE, kind=FailureKind.WORK_MISMATCH, message="; ".join(broken))


def _collect_notes(result: TrialResult, trace: TraceEvidence | None) -> tuple[str, ...]:
    not_finite = [name for name, value in result.metrics.items() if not math.isfinite(value)]
    notes = [f"the run script's {name} is not finite and was left out" for name in not_finite]
    return (*notes, *(trace.notes if trace else ()))
