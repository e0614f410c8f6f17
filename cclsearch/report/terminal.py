"""Output of a running search as plain lines or JSON events, fed by the ledger's events."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO

from cclsearch.core.text import one_line, plain
from cclsearch.core.values import Provenance
from cclsearch.propose.events import LlmTurn, ReportedEvent
from cclsearch.record.event import EVENT, Event, RetryKind, TrialFinished, TrialRetried, TrialSubmitted
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.report.figures import ObjectiveFigure, format_share, name_better

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
