"""One trial in sentences: configuration, rationale, result, admission, and diagnosis from the traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cclsearch.core.job_file import read_tail
from cclsearch.core.secrets.redact import redact
from cclsearch.launch.contract import STDERR_FILE
from cclsearch.record.trial import Trial
from cclsearch.report.figures import describe_metric, find_figure, format_value, name_values
from cclsearch.report.terminal import result_text
from cclsearch.run.folder import Run
from cclsearch.scoring.outcome import Outcome
from cclsearch.tasks.base import Task, task_of


def trial_as_json(run: Run, trial: Trial) -> dict[str, Any]:
    """Everything the ledger holds about one trial, as plain data."""
    return {
        "run": run.spec.run_id,
        "trial": trial.number,
        "config": dict(trial.config),
        "purpose": trial.purpose.value,
        "proposer": trial.proposer,
        "rationale": trial.rationale,
        "attempts": trial.attempt,
        "repeats": [retry.reason for retry in trial.retries],
        "revisions": [event.text for event in trial.revisions],
        "earlier_searches": [one.run_id for one in run.spec.earlier.searches] if run.spec.earlier else [],
        "outcome": trial.outcome.model_dump(mode="json") if trial.outcome else None,
        "evidence": str(run.trial_folder(trial.number)),
        "provenance": run.spec.provenance.value,
        "damage": run.state.damage,
    }


def describe_trial_in_full(run: Run, trial: Trial, *, log_lines: int) -> list[str]:
    """The same as lines for a person, with the end of the error log if the trial failed."""
    metric = task_of(run.spec.card).primary_metric
    lines = [
        f"trial {trial.number} of {run.spec.run_id} ({run.spec.provenance.value})",
        f"configuration: {trial.config}",
    ]
    lines.append(f"result: {result_text(trial, find_figure(run.spec), limit=300)}")
    lines.append(f"proposed by {trial.proposer}" + (f": {trial.rationale}" if trial.rationale else ""))
    expected = trial.expects.metrics.get(metric.name)
    if expected is not None and f"{expected:.3g} {metric.unit or ''}".rstrip() not in trial.rationale:
        lines.append(f"expected {metric.words}: {format_value(metric, expected)}")
    lines += [f"predictions rest on {text}" for text in _describe_earlier(run)]
    lines += [f"attempt {number} does not count: {retry.reason}" for number, retry in enumerate(trial.retries, 1)]
    lines += [f"revised: {event.text}" for event in trial.revisions]
    if trial.outcome:
        lines += _outcome_lines(trial.outcome, task_of(run.spec.card))
    folder = run.trial_folder(trial.number)
    if trial.outcome and trial.outcome.failure:
        lines += _log_tail(folder / STDERR_FILE, log_lines)
    return [*lines, f"evidence: {folder}"]


def _describe_earlier(run: Run) -> list[str]:
    """Earlier runs from which the surrogate learned before the first trial."""
    spec = run.spec
    priors = [one.run_id for one in spec.earlier.searches] if spec.earlier and spec.earlier.priors else []
    times = [Path(name).name for name in spec.learn_from]
    told = [f"multipliers learned from {', '.join(priors)}"] if priors else []
    return told + ([f"the trials of {', '.join(times)}"] if times else [])


def _outcome_lines(outcome: Outcome, task: Task) -> list[str]:
    lines = []
    if outcome.failure:
        where = f" (rank {outcome.failure.rank})" if outcome.failure.rank is not None else ""
        lines.append(f"failed in {outcome.failure.stage.value}{where}: {outcome.failure.message}")
    lines += [f"  {describe_metric(task, name, value)}" for name, value in sorted(outcome.metrics.items())]
    if outcome.spread is not None:
        lines.append(f"  spread of {name_values(task.primary_metric)}: {outcome.spread:.1%}")
    if outcome.admission:
        standing = "ended early" if outcome.is_pruned else "not admitted"
        lines.append("admitted" if outcome.admission.admitted else standing)
        for verdict in outcome.admission.verdicts:
            mark = {True: "ok", False: "NO", None: "--"}[verdict.ok]
            lines.append(f"  {mark}  {verdict.rule}: {verdict.detail}")
    lines += [f"diagnosis: {text}" for text in outcome.diagnosis]
    unit = task.diagnosed_unit
    lines += [f"  {cause}: {seconds:.4g} s of a {unit}" for cause, seconds in outcome.seconds_by_cause.items()]
    return lines + [f"note: {note}" for note in outcome.notes]


def _log_tail(path: Path, count: int) -> list[str]:
    tail = redact(read_tail(path, 16384)).splitlines()[-count:]
    return [f"end of {path.name}:", *(f"  {line[:300]}" for line in tail)] if tail else []
