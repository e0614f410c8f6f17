"""A search and its trials as lines for a terminal, or as JSON: events as they happen, and one trial in sentences."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from cclsearch.core.job_file import read_tail
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line, plain
from cclsearch.core.values import Provenance
from cclsearch.launch.contract import STDERR_FILE
from cclsearch.propose.events import LlmTurn, ReportedEvent
from cclsearch.record.event import EVENT, Event, RetryKind, TrialFinished, TrialRetried, TrialSubmitted
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.report.figures import (
    ObjectiveFigure,
    describe_metric,
    find_figure,
    format_share,
    format_value,
    name_better,
    name_values,
)
from cclsearch.run.folder import Run
from cclsearch.scoring.outcome import Outcome
from cclsearch.tasks.base import Task, task_of

NOTHING_RUNS = frozenset({"replay", "simulate"})
"""Launchers whose trials end as soon as they start."""
SOURCES = {"default": "surrogate", "pareto": "surrogate", "llm": "LLM", "policy": "LLM policy"}
"""Proposer -> its name for people; any other proposer by its own name."""
Watcher = Callable[[Event, RunState], None]


def watch_json() -> Watcher:
    """A watcher that prints each event as one JSON line."""

    def watch(event: Event, state: RunState) -> None:
        print(EVENT.dump_json(event).decode(), flush=True)

    return watch


def watch_lines(
    budget: int, figure: ObjectiveFigure, stream: IO[str] | None = None, *, max_attempts: int = 0
) -> Watcher:
    """A watcher that prints one plain line for each event that matters to a person."""

    def watch(event: Event, state: RunState) -> None:
        line = describe_event(event, state, budget, figure, max_attempts=max_attempts)
        if line:
            print(plain(line), file=stream or sys.stdout, flush=True)

    return watch


def describe_event(
    event: Event, state: RunState, budget: int, figure: ObjectiveFigure, *, max_attempts: int = 0
) -> str | None:
    """One line about an event; None for an event that is not shown. A limit of 0 attempts means that it is unknown."""
    match event:
        case TrialSubmitted():
            trial = state.trials[event.trial]
            if event.handle.launcher in NOTHING_RUNS:
                return None
            return f"trial {trial.number:>3}  started   {trial.config}  ({trial.proposer})"
        case TrialRetried():
            return f"trial {event.trial:>3}  {_describe_retry(event, state, max_attempts)}"
        case TrialFinished():
            return describe_trial(state.trials[event.trial], state, budget, figure)
        case ReportedEvent() if not isinstance(event, LlmTurn):
            return f"           {event.label}: {one_line(event.text, 200)}"
        case _:
            return None


def _describe_retry(event: TrialRetried, state: RunState, max_attempts: int) -> str:
    if event.kind is RetryKind.CANCELLED:
        return "cancelled; it runs again on resume"
    reason = f"{event.failure.kind.describe()}: {event.failure.message}" if event.failure else event.reason
    text = f"retrying ({one_line(reason, 300)}), attempt {event.attempt + 1}"
    uncounted = event.attempt - state.trials[event.trial].num_counted_retries if max_attempts else 0
    return f"{text} of {max_attempts + uncounted}" if max_attempts else text


def describe_trial(trial: Trial, state: RunState, budget: int, figure: ObjectiveFigure) -> str:
    """A finished trial in one line: result, configuration, proposer, best so far, trials left."""
    best = state.best
    best_text = f"best so far {figure.format(best)}{_lead_note(trial, state, figure)}" if best else "no best yet"
    left = max(budget - state.num_spent, 0)
    return f"{describe_result(trial, figure)}  {best_text}, {left} of {budget} trials left"


def describe_result(trial: Trial, figure: ObjectiveFigure) -> str:
    """A trial in one line: result, configuration, proposer."""
    return f"trial {trial.number:>3}  {result_text(trial, figure):<24}  {trial.config}  ({trial.proposer})"


def describe_best_so_far(best: Trial, state: RunState, figure: ObjectiveFigure) -> str:
    """The best trial so far, with a note if it leads only within noise."""
    mark = best.outcome.provenance.mark if best.outcome else ""
    return f"trial {best.number}, {figure.format(best)}{mark}{_lead_note(best, state, figure)}"


def _lead_note(trial: Trial, state: RunState, figure: ObjectiveFigure) -> str:
    """A note if a trial leads only within noise: the runner-up, and the confidence of beating it; else empty."""
    if trial.outcome is None or not trial.outcome.provenance.is_repeatable:
        return ""
    from cclsearch.report.certainty import compare_with_runner_up
    from cclsearch.stats.noise import DEFAULT_CONFIDENCE

    lead = compare_with_runner_up(state, trial)
    if lead is None or lead[1] >= DEFAULT_CONFIDENCE:
        return ""
    return (
        f" (within noise of trial {lead[0]}: {format_share(lead[1])} probability of being {name_better(figure.metric)})"
    )


def result_text(trial: Trial, figure: ObjectiveFigure, limit: int = 60, *, as_data: bool = False) -> str:
    """The result of a trial: its figure, the failure kind (`as_data`: its value), or the violated rules."""
    outcome = trial.outcome
    if outcome is None:
        return "running" if trial.handle else "waiting"
    if outcome.failure:
        return outcome.failure.kind.value if as_data else outcome.failure.kind.describe()
    if outcome.is_pruned:
        return one_line(f"{figure.format(trial)}, ended early", limit)
    if outcome.admission and not outcome.admission.admitted:
        rules = ", ".join(v.rule for v in outcome.admission.verdicts if v.ok is False)
        measured = f"{figure.format(trial)}, " if figure.value(trial) is not None and not as_data else ""
        return one_line(f"{measured}not admitted: {rules}", limit)
    suffix = "" if outcome.provenance is Provenance.MEASURED else f" {outcome.provenance.value}"
    return figure.format(trial) + suffix


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
