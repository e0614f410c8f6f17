"""Decide when the LLM's trials show a stall, and how often it may still overrule the surrogate."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, takewhile

from cclsearch.core.text import count_of
from cclsearch.core.values import Model
from cclsearch.propose.agent.memory.history import past_turns
from cclsearch.propose.agent.prompt.surrogate_table import improvement_threshold
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.snapshot import NEGLIGIBLE
from cclsearch.propose.events import ArbiterState, LlmTurn, SubmittedConfig


class ArbiterSettings(Model):
    """The arbiter's thresholds, chosen over all simulated models of `benchmarks/agent.py`."""

    num_seeds: int = 2
    patience: int = 3
    """Trials in a row, of turns without an improvement beyond the noise, that suspend the LLM; some count less, see
    `weigh`.
    """
    patience_after_gain: int = 6
    """The same after a turn that improved the best."""
    patience_limited: int = 1
    """The same after a stall, until a trial improves the best."""
    same_failures: int = 2
    """Consecutive trials of the LLM with the same kind of failure that suspend it, in turns that did not improve, if
    none was among the surrogate's first choices."""
    explore: int = 2
    """Trials of the fallback after the first stall; each further stall doubles it."""
    max_explore: int = 8
    explore_share: float = 0.25
    """The fallback explores for at most this share of the budget left, and for at least one trial."""
    overrules: int = 1
    """Overrules of the surrogate that the LLM has before one of them improved the best; afterwards it chooses among the
    free configurations.
    """

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
    """Number of the turn that submitted it."""


def find_llm_trials(view: SearchView) -> list[LlmTrial]:
    """The LLM's finished trials, by number."""
    noise = improvement_threshold(view)
    items = {
        item.config.digest: (item, turn.turn)
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
            trials.append(LlmTrial(o, item, improved, turn))
        if o.loss is not None:
            best = o.loss if best is None else min(best, o.loss)
    return trials


@dataclass(frozen=True)
class StallCount:
    """Distance of the LLM from a stall."""

    idle: tuple[LlmTrial, ...]
    """Its latest trials, oldest first, of turns that did not improve the best."""
    weights: tuple[tuple[float, str], ...]
    """Weight of each trial, and the reason, in words."""
    patience: int
    """Sum of the weights at a stall."""
    is_limited: bool
    """Whether the LLM stalled and has not improved the best since: it chooses among the most promising."""

    @property
    def total(self) -> float:
        """Sum of the weights."""
        return sum(weight for weight, _ in self.weights)

    def describe(self) -> str:
        """Return the distance from a stall in a line."""
        since = " since your stall" if self.is_limited else ""
        text = f"your trials in turns that did not improve the best{since}: they count {self.total:g} of the "
        text += f"{self.patience} that make a stall"
        pairs = zip(self.idle, self.weights, strict=True)
        named = [f"trial {t.observation.trial} counts {weight:g}{why and f' ({why})'}" for t, (weight, why) in pairs]
        return text + (f": {', '.join(named)}" if named else "")


def find_standing(view: SearchView, state: ArbiterState, rules: ArbiterSettings) -> StallCount:
    """Return the LLM's distance from a stall, by its trials since it took over.

    A turn is judged as a unit: it improved if one of its trials did.
    """
    recent = [trial for trial in find_llm_trials(view) if trial.observation.trial >= state.since_trial]
    turns = [list(trials) for _, trials in groupby(recent, key=lambda trial: trial.turn)]
    turns_idle = list(takewhile(lambda trials: not any(trial.improved for trial in trials), reversed(turns)))
    idle = tuple(trial for trials in reversed(turns_idle) for trial in trials)
    limited = state.stalls > 0 and not any(trial.improved for trial in recent)
    has_gained = len(turns_idle) < len(turns)
    patience = rules.patience_after_gain if has_gained else rules.patience_limited if limited else rules.patience
    return StallCount(idle, tuple(weigh(trial) for trial in idle), patience, limited)


def weigh(trial: LlmTrial) -> tuple[float, str]:
    """Return the weight of a trial of a turn without an improvement, and the reason."""
    if trial.observation.is_unjudged:
        return 0.0, "not admitted, which is not your fault"
    return (1.0, "") if trial.item.is_own_idea else (0.5, "the surrogate would have run it too")


def find_stall(view: SearchView, state: ArbiterState, rules: ArbiterSettings) -> tuple[str, str] | None:
    """Cause and reason to suspend the LLM now, from its trials since it took over; None if there is none.

    A turn that did not improve the best counts once all that it submitted has run.
    """
    standing = find_standing(view, state, rules)
    idle = standing.idle
    last = idle[-rules.same_failures :]
    kinds = {trial.observation.failure.kind if trial.observation.failure else None for trial in last}
    are_own = all(trial.item.is_own_idea for trial in last)  # its first choices would have failed without an LLM too
    if len(last) == rules.same_failures and len(kinds) == 1 and None not in kinds and are_own:
        kind = next(kind for kind in kinds if kind).value.replace("_", " ")
        return "same failure", f"stall: {len(last)} trials failed in the same way ({kind})"
    if not idle or _is_running(view, idle[-1].turn):
        return None
    if standing.total >= standing.patience:
        what = count_of(len(idle), "trial")
        return "no improvement", f"stall: {what} in turns that did not improve the best beyond the noise"
    return None


def find_won_bet(view: SearchView) -> tuple[str, str] | None:
    """Return that the strongest rival did not beat the best, and the model's reason to end the search; None if it did,
    or has not run, or the latest turn asked for none.
    """
    turns = past_turns(view.events)
    if not turns or not turns[-1].bet:
        return None
    rival = turns[-1].submitted[0].config
    ran = next((o for o in view.observations if o.config == rival and o.trial > turns[-1].last_seen), None)
    best = min((o.loss for o in view.observations if o.loss is not None and o is not ran), default=None)
    if ran is None or ran.is_unjudged or best is None:
        return None
    if ran.loss is not None and ran.loss < best - abs(best) * NEGLIGIBLE:
        return None
    return f"its strongest rival, trial {ran.trial}, did not beat the best", turns[-1].bet


def _is_running(view: SearchView, turn: int) -> bool:
    """Whether a configuration from this turn is queued or running."""
    submitted = [item for past in past_turns(view.events) if past.turn == turn for item in past.submitted]
    running = any(view.space.row(item.config) in view.pending for item in submitted)
    queued = find_queued(view)
    return running or (queued is not None and queued[0].turn == turn)


def overrules_left(view: SearchView, rules: ArbiterSettings) -> int:
    """Return how often the LLM may still overrule the surrogate; each overrule that improved the best adds two."""
    num_improved = sum(t.item.is_overrule and t.improved for t in find_llm_trials(view))
    return rules.overrules + 2 * num_improved - len(find_llm_rows(view, overrules=True))


def find_llm_rows(view: SearchView, *, overrules: bool = False) -> frozenset[int]:
    """Rows that the LLM chose and that were run; with `overrules`, only those against the surrogate."""
    taken = view.taken_N
    items = (item for turn in past_turns(view.events) for item in turn.submitted)
    rows = (view.space.row(item.config) for item in items if item.is_overrule or not overrules)
    return frozenset(row for row in rows if row is not None and taken[row])


def is_repeat_open(view: SearchView, row: int) -> bool:
    """Whether that row has one result so far, and does not run now."""
    runs = sum(o.row == row for o in view.observations)
    return view.can_repeat and runs == 1 and row not in view.pending


def find_queued(view: SearchView) -> tuple[LlmTurn, list[SubmittedConfig]] | None:
    """Return the latest turn with its submissions that are neither measured nor running; None if there are none."""
    turns = past_turns(view.events)
    if not turns:
        return None
    # one that was not admitted ran before this turn chose it again
    seen = {o.config.digest for o in view.observations if not o.is_unjudged or o.trial > turns[-1].last_seen}
    queued = []
    for item in turns[-1].submitted:
        row = view.space.row(item.config)
        is_new = row is not None and (is_repeat_open(view, row) if item.is_repeat else item.config.digest not in seen)
        if is_new and not view.is_closed(row):
            queued.append(item)
    return (turns[-1], queued) if queued else None
