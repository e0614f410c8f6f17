"""When the LLM's trials show a stall, and how often it may still overrule the surrogate."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from cclsearch.core.values import Model
from cclsearch.propose.agent.history import past_turns
from cclsearch.propose.agent.surrogate_table import improvement_threshold
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.events import ArbiterState, LlmTurn, SubmittedConfig


class ArbiterSettings(Model):
    """The arbiter's thresholds."""

    num_seeds: int = 2
    patience: int = 1
    """Consecutive trials of the LLM's own choice without an improvement beyond the noise that suspend it. A trial that
    the surrogate would have run as well counts half."""
    patience_again: int = 1
    """The same after the LLM was suspended, if it had finished trials before."""
    same_failures: int = 2
    """Consecutive trials of the LLM with the same kind of failure that suspend it."""
    explore: int = 4
    """Trials of the fallback after the first stall; each further stall doubles it, up to `max_explore`."""
    max_explore: int = 8
    overrules: int = 1
    """How often the LLM may overrule the surrogate before one overrule has improved the best; after that, it chooses
    among the surrogate's most promising configurations."""
    max_queue: int = 3
    """Configurations that one turn may submit if trials run one after another."""


@dataclass(frozen=True)
class LlmTrial:
    """One finished trial of the LLM."""

    observation: Observation
    item: SubmittedConfig
    improved: bool
    """Whether it beat, beyond the noise, the best of all trials with lower numbers."""


def find_llm_trials(view: SearchView) -> list[LlmTrial]:
    """The LLM's finished trials, by number."""
    noise = improvement_threshold(view)
    items = {item.config.digest: item for turn in past_turns(view.events) for item in turn.submitted}
    trials: list[LlmTrial] = []
    best: float | None = None
    for o in sorted((o for o in view.observations if not o.is_confirmation), key=lambda o: o.trial):
        improved = o.loss is not None and (best is None or o.loss < best - abs(best) * noise)
        if o.config.digest in items:
            trials.append(LlmTrial(o, items[o.config.digest], improved))
        if o.loss is not None:
            best = o.loss if best is None else min(best, o.loss)
    return trials


def find_stall(view: SearchView, state: ArbiterState, rules: ArbiterSettings) -> tuple[str, str] | None:
    """Cause and reason to suspend the LLM now, from its trials since it took over; None if there is none."""
    all_trials = find_llm_trials(view)
    recent = [trial for trial in all_trials if trial.observation.trial >= state.since_trial]
    last = recent[-rules.same_failures :]
    kinds = {trial.observation.failure.kind for trial in last if trial.observation.failure}
    all_failed = all(trial.observation.failure for trial in last)
    if len(last) == rules.same_failures and all_failed and len(kinds) == 1:
        kind = next(iter(kinds)).value.replace("_", " ")
        return "same failure", f"its last {len(last)} trials failed in the same way ({kind})"
    was_suspended = state.stalls > 0 and len(recent) < len(all_trials)
    patience = rules.patience_again if was_suspended else rules.patience
    idle = list(takewhile(lambda trial: not trial.improved, reversed(recent)))
    if sum(1.0 if trial.item.is_own_idea else 0.5 for trial in idle) >= patience:
        trials = "trial" if len(idle) == 1 else f"{len(idle)} trials"
        return "no improvement", f"its last {trials} did not improve beyond the noise"
    return None


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


def find_queued(view: SearchView) -> tuple[LlmTurn, list[SubmittedConfig]] | None:
    """The latest turn and those of its submissions that are neither measured nor running; None if there are none."""
    turns = past_turns(view.events)
    if not turns:
        return None
    seen = {o.config.digest for o in view.observations}
    queued = []
    for item in turns[-1].submitted:
        row = view.space.row(item.config)
        if row is not None and not view.is_closed(row) and item.config.digest not in seen:
            queued.append(item)
    return (turns[-1], queued) if queued else None
