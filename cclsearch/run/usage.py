"""Node-hours of a search: nodes times hours of the attempts in its ledger, queue time included."""

from __future__ import annotations

import math

from cclsearch.core.text import count_of
from cclsearch.core.values import Config, Provenance
from cclsearch.record.state import RunState
from cclsearch.record.trial import Trial, TrialState
from cclsearch.run.spec import RunSpec
from cclsearch.space.table import count_ranks


def count_nodes(spec: RunSpec, config: Config) -> int:
    """Return the number of nodes of a configuration; 0 if nothing is measured."""
    if spec.provenance is not Provenance.MEASURED:
        return 0
    return math.ceil(count_ranks(config) / max(spec.card.hardware.accelerators_per_node, 1))


def count_node_hours(spec: RunSpec, trial: Trial, since_s: float, now_s: float) -> float:
    """Return nodes times hours of a trial's attempts after `since_s`, each from its submission to its end (or now)."""
    spans = [*trial.spans, *([(trial.attempt_s, now_s)] if trial.attempt_s is not None else [])]
    seconds = sum(max(end_s - max(start_s, since_s), 0.0) for start_s, end_s in spans)
    return count_nodes(spec, trial.config) * seconds / 3600


def sum_node_hours(spec: RunSpec, state: RunState, now_s: float) -> float:
    """Return the node-hours of all trials so far; 0 if nothing is measured."""
    if spec.provenance is not Provenance.MEASURED:
        return 0.0
    return sum(count_node_hours(spec, trial, 0.0, now_s) for trial in state.trials.values())


def find_node_hour_limit(spec: RunSpec, state: RunState) -> float | None:
    """Return the limit of the search in node-hours, as last given; None if it has none."""
    return state.max_node_hours or spec.limits.max_node_hours


def describe_usage(spec: RunSpec, state: RunState) -> str | None:
    """Return the node-hours used, of the limit if there is one; None if nothing was measured."""
    if spec.provenance is not Provenance.MEASURED or not state.trials:
        return None
    used, limit = sum_node_hours(spec, state, state.last_s), find_node_hour_limit(spec, state)
    of = f" of at most {limit:.4g}" if limit is not None else ""
    return f"{used:.3g}{of} node-hours used, from submission to end of every attempt"


def describe_saved(spec: RunSpec, state: RunState) -> str | None:
    """Return how many trials ended early, and about how many node-hours that saved; None if none did."""
    pruned = list(state.trials.select(TrialState.PRUNED))
    if not pruned:
        return None
    saved = sum(count_nodes(spec, trial.config) * (trial.outcome.saved_s or 0.0) for trial in pruned if trial.outcome)
    what = f"{count_of(len(pruned), 'trial')} ended early, slower than the best beyond doubt"
    return f"{what}: about {saved / 3600:.2g} node-hours saved (the steps that did not run)"
