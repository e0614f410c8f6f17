"""When the LLM's trials show a stall, and how often it may still overrule the surrogate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

from cclsearch.core.values import Model
from cclsearch.propose.agent.broken_off import find_broken_off
from cclsearch.propose.agent.history import past_turns
from cclsearch.propose.agent.surrogate_table import improvement_threshold
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.events import ArbiterState, LlmTurn, SubmittedConfig

CREDIBLE = 0.5
"""Share of the surrogate's error that the LLM's error is at most, for a trial whose outcome it knew better."""


class ArbiterSettings(Model):
    """The arbiter's thresholds, chosen over all simulated models of `benchmarks/agent.py`."""

    num_seeds: int = 2
    patience: int = 1
    """Turns in a row without an improvement beyond the noise that suspend the LLM. A turn whose trials the surrogate
    would have run as well, or whose outcome the LLM knew better than the surrogate, counts half."""
    patience_after_gain: int = 2
    """The same after a turn that improved the best."""
    same_failures: int = 2
    """Consecutive trials of the LLM with the same kind of failure that suspend it, in turns that did not improve."""
    explore: int = 2
    """Trials of the fallback after the first stall; each further stall doubles it."""
    max_explore: int = 8
    explore_share: float = 0.25
    """The fallback explores for at most this share of the budget left, and for at least one trial."""
    overrules: int = 1
    """How often the LLM may overrule the surrogate before one overrule has improved the best; after that, it chooses
    among the configurations that are free."""
    max_queue: int = 3
    """Configurations that one turn may submit if trials run one after another."""

    def find_explore(self, stalls: int, budget_left: int) -> int:
        """Trials of the fallback after a stall that follows `stalls` others."""
        longest = max(1, int(self.explore_share * budget_left))
        return min(self.explore << min(stalls, 10), self.max_explore, longest)


@dataclass(frozen=True)
class LlmTrial:
    """One finished trial of the LLM."""

    observation: Observation
    item: SubmittedConfig
    improved: bool
    """Whether it beat, beyond the noise, the best of all trials with lower numbers."""
    turn: int
    """Number of the turn that submitted it, or of the turn that this one continues."""
    is_credible: bool = False
    """Whether the LLM's expectation was much closer to the measurement than the surrogate's prediction was."""


def find_llm_trials(view: SearchView) -> list[LlmTrial]:
    """The LLM's finished trials, by number."""
    noise = improvement_threshold(view)
    items = {
        item.config.digest: (item, turn.root)
        for turn in past_turns(view.events)
        for item in turn.submitted
        if not item.is_repeat
    }
    trials: list[LlmTrial] = []
    best: float | None = None
    for o in sorted((o for o in view.observations if not o.is_confirmation), key=lambda o: o.trial):
        improved = o.loss is not None and (best is None or o.loss < best - abs(best) * noise)
        if o.config.digest in items:
            item, turn = items[o.config.digest]
            trials.append(LlmTrial(o, item, improved, turn, _is_credible(view, o, item, noise)))
        if o.loss is not None:
            best = o.loss if best is None else min(best, o.loss)
    return trials


def _is_credible(view: SearchView, o: Observation, item: SubmittedConfig, noise: float) -> bool:
    """Whether the surrogate erred beyond the noise, and the LLM at most by `CREDIBLE` of the log of that error."""
    metric = view.primary.name
    figures = (o.value(metric), item.expects.metrics.get(metric), item.predicted.metrics.get(metric))
    measured, expected, predicted = (math.log(v) if v is not None and v > 0 else math.nan for v in figures)
    surrogate_error = abs(measured - predicted)
    return surrogate_error > noise and abs(measured - expected) <= CREDIBLE * surrogate_error


def find_stall(view: SearchView, state: ArbiterState, rules: ArbiterSettings) -> tuple[str, str] | None:
    """Cause and reason to suspend the LLM now, from its trials since it took over; None if there is none.

    A turn is judged as a unit, once all that it submitted has run: it improved if one of its trials did.
    """
    recent = [trial for trial in find_llm_trials(view) if trial.observation.trial >= state.since_trial]
    turns = [list(trials) for _, trials in groupby(recent, key=lambda trial: trial.turn)]
    idle = list(takewhile(lambda trials: not any(trial.improved for trial in trials), reversed(turns)))
    last = [trial for trials in reversed(idle) for trial in trials][-rules.same_failures :]
    kinds = {trial.observation.failure.kind if trial.observation.failure else None for trial in last}
    if len(last) == rules.same_failures and len(kinds) == 1 and None not in kinds:
        kind = next(kind for kind in kinds if kind).value.replace("_", " ")
        return "same failure", f"stall: {len(last)} trials failed in the same way ({kind})"
    if idle and (_is_running(view, idle[0][0].turn) or find_broken_off(view) is not None):
        return None
    patience = rules.patience_after_gain if len(idle) < len(turns) else rules.patience
    if sum(map(_weigh_idle, idle)) >= patience:
        what = "one turn" if len(idle) == 1 else f"{len(idle)} turns"
        return "no improvement", f"stall: {what} did not improve the best beyond the noise"
    return None


def _weigh_idle(trials: Sequence[LlmTrial]) -> float:
    """How much a turn without an improvement counts: half if the surrogate would have run its trials as well, or if
    the LLM knew better than the surrogate how most of them would come out: it learns from them what to try next."""
    if not any(trial.item.is_own_idea for trial in trials):
        return 0.5
    return 0.5 if 2 * sum(trial.is_credible for trial in trials) > len(trials) else 1.0


def _is_running(view: SearchView, turn: int) -> bool:
    """Whether something that this turn submitted is queued or running."""
    submitted = [item for past in past_turns(view.events) if past.root == turn for item in past.submitted]
    running = any(view.space.row(item.config) in view.pending for item in submitted)
    queued = find_queued(view)
    return running or (queued is not None and queued[0].root == turn)


def is_limited(view: SearchView, state: ArbiterState) -> bool:
    """Whether the LLM stalled and has not improved the best since: it chooses among the surrogate's most promising."""
    improved = (trial.improved for trial in find_llm_trials(view) if trial.observation.trial >= state.since_trial)
    return state.stalls > 0 and not any(improved)


def overrules_left(view: SearchView, rules: ArbiterSettings) -> int:
    """How often the LLM may still overrule the surrogate; each overrule that improved the best adds two."""
    num_improved = sum(t.item.is_overrule and t.improved for t in find_llm_trials(view))
    return rules.overrules + 2 * num_improved - len(overruled_rows(view))


def overruled_rows(view: SearchView) -> frozenset[int]:
    """Rows that the LLM chose against the surrogate and that were run; those that a stall dropped do not count."""
    taken = view.taken_N
    rows = (
        view.space.row(item.config) for turn in past_turns(view.events) for item in turn.submitted if item.is_overrule
    )
    return frozenset(row for row in rows if row is not None and taken[row])


def is_repeat_open(view: SearchView, row: int) -> bool:
    """Whether that row has one result so far, and does not run now."""
    runs = sum(o.row == row for o in view.observations)
    return view.can_repeat and runs == 1 and row not in view.pending


def find_queued(view: SearchView) -> tuple[LlmTurn, list[SubmittedConfig]] | None:
    """The latest turn and those of its submissions that are neither measured nor running; None if there are none."""
    turns = past_turns(view.events)
    if not turns:
        return None
    seen = {o.config.digest for o in view.observations}
    queued = []
    for item in turns[-1].submitted:
        row = view.space.row(item.config)
        is_new = row is not None and (is_repeat_open(view, row) if item.is_repeat else item.config.digest not in seen)
        if is_new and not view.is_closed(row):
            queued.append(item)
    return (turns[-1], queued) if queued else None
