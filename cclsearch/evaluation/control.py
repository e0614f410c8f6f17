"""Controls: the best configuration runs again when the cluster may have changed, so that figures stay comparable.

A window is a day, a node set and an allocation. Figures of another window are divided by its ratio to the first, from
configurations that ran in both; the ledger keeps the measured figures. Controls cost no budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from cclsearch.core.metrics import Direction
from cclsearch.core.values import Provenance
from cclsearch.propose.base import Observation, Proposal
from cclsearch.record.event import Purpose
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial
from cclsearch.run.spec import RunSpec
from cclsearch.scoring.evidence import Evidence
from cclsearch.scoring.outcome import ClusterWindow
from cclsearch.tasks.base import task_of

# If every job gets other nodes, controls would double the search.
MAX_SHARE = 0.25
"""Largest number of controls per trial of the budget, but at least `MIN_CONTROLS` controls."""
MIN_CONTROLS = 2


def find_window(spec: RunSpec, trial: Trial, evidence: Evidence, state: RunState) -> ClusterWindow | None:
    """Return where and when a measured trial ran; None if its figures are never corrected."""
    if not can_correct(spec) or evidence.attempt is None:
        return None
    job_id = trial.handle.job_id if trial.handle is not None else ""
    return ClusterWindow(
        day=datetime.fromtimestamp(evidence.attempt.started_s, UTC).date().isoformat(),
        hosts=tuple(sorted(set(evidence.result.hosts))),
        allocation=job_id.partition(".")[0] if "." in job_id else "",  # a step of an allocation: `4711.name`
        block=len(state.controls) if spec.limits.control_every else 0,
    )


def can_correct(spec: RunSpec) -> bool:
    """Whether figures can be corrected: measured, with an objective of one metric whose loss is proportional to it."""
    objective = spec.objective
    term = objective.terms[0]
    is_ratio = term.direction is Direction.MINIMIZE or term.reciprocal
    return spec.provenance is Provenance.MEASURED and len(objective.terms) == 1 and term.weight is None and is_ratio


def propose_control(spec: RunSpec, state: RunState) -> Proposal | None:
    """Return the control to run next; None if none is needed, one is running, or their limit is reached."""
    if not can_correct(spec) or not state.ranked or any(t.purpose is Purpose.CONTROL for t in state.unfinished):
        return None
    every = spec.limits.control_every
    best = state.best
    if every and best is not None and (since := _count_since_control(state)) >= every:
        return Proposal(best.config, "control", f"repeats trial {best.number} after {since} trials")
    if len(state.windows.names) < 2 or len(state.controls) >= max(MIN_CONTROLS, MAX_SHARE * spec.limits.budget):
        return None
    last = next((n for n in reversed(state.trials.finish_order) if state.windows.find(n) is not None), None)
    window = None if last is None else state.windows.find(last)
    if not window or state.window_ratio(last or 0).num_pairs:
        return None
    before = [n for n in state.ranked if state.windows.find(n) not in (window, None)]
    if not before:
        return None
    best_before = min(before, key=lambda n: state.corrected_loss(n) or 0.0)
    names = state.windows.names
    text = f"repeats trial {best_before} ({names[state.windows.find(best_before) or 0]}): now {names[window]}"
    return Proposal(state.trials[best_before].config, "control", text)


def _count_since_control(state: RunState) -> int:
    """Return the number of finished trials of the search since the last control was proposed."""
    count = 0
    for number in reversed(state.trials.finish_order):
        if state.trials[number].purpose is Purpose.CONTROL:
            break
        count += state.trials.briefs[number].is_search
    return count


def correct_observations(observations: Sequence[Observation], spec: RunSpec, state: RunState) -> Sequence[Observation]:
    """Return a proposer's observations: losses and the objective's metric, corrected to the first window."""
    if len(state.windows.names) < 2 or not can_correct(spec):
        return observations
    primary = task_of(spec.card).primary_metric
    term = spec.objective.terms[0]
    greater = {primary.name: primary.greater_is_better, term.metric: term.direction is Direction.MAXIMIZE}
    corrected = []
    for seen in observations:
        ratio = state.window_ratio(seen.trial)
        if seen.loss is not None and ratio.num_pairs:
            metrics = {
                name: value * ratio.ratio if greater[name] else value / ratio.ratio
                for name, value in seen.metrics.items()
                if name in greater
            }
            seen = replace(seen, loss=seen.loss / ratio.ratio, metrics={**seen.metrics, **metrics})
        corrected.append(seen)
    return tuple(corrected)
