"""When the LLM stalls by what its trials show, and what credit it has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from cclsearch.core.values import Model
from cclsearch.propose.agent.arbiter.states import State
from cclsearch.propose.agent.history import PastTurn, SubmittedConfig, past_turns
from cclsearch.propose.agent.surrogate_table import estimate_noise
from cclsearch.propose.base import Observation, SearchView


class ArbiterSettings(Model):
    """The arbiter's numbers."""

    num_seeds: int = 2
    patience: int = 1
    """Ideas of the LLM's own in a row without an improvement beyond the noise, before it is put aside. A trial that the
    surrogate would have run as well counts half."""
    patience_again: int = 1
    """The same after it was put aside with trials of its own behind it."""
    same_failures: int = 2
    """Trials of the LLM in a row that fail in the same way."""
    explore: int = 4
    """Trials of the fallback after the first stall; doubled with each further one."""
    explore_most: int = 8
    overrules: int = 1
    """Times that the LLM may overrule the surrogate before one of them has paid: beyond them, it chooses among what the
    surrogate finds most promising."""
    max_queue: int = 3
    """Configurations that one turn may submit when trials run one after another."""


@dataclass(frozen=True)
class Judged:
    """One finished trial of the LLM."""

    observation: Observation
    item: SubmittedConfig
    improved: bool
    """Whether it beat, beyond the noise, the best of all trials that were numbered before it."""


def judge_trials(view: SearchView) -> list[Judged]:
    """The LLM's finished trials, by number."""
    noise = estimate_noise(view)
    items = {item.config.digest: item for turn in past_turns(view.remarks) for item in turn.submitted}
    judged: list[Judged] = []
    best: float | None = None
    for o in sorted((o for o in view.observations if not o.is_confirmation), key=lambda o: o.trial):
        improved = o.loss is not None and (best is None or o.loss < best - abs(best) * noise)
        if o.config.digest in items:
            judged.append(Judged(o, items[o.config.digest], improved))
        if o.loss is not None:
            best = o.loss if best is None else min(best, o.loss)
    return judged


def find_stall(view: SearchView, state: State, rules: ArbiterSettings) -> tuple[str, str] | None:
    """Cause and reason for which the LLM should be put aside now, by its trials since it took over; None if none."""
    judged_all = judge_trials(view)
    recent = [judged for judged in judged_all if judged.observation.trial >= state.since_trial]
    last = recent[-rules.same_failures :]
    kinds = {judged.observation.failure.kind for judged in last if judged.observation.failure}
    all_failed = all(judged.observation.failure for judged in last)
    if len(last) == rules.same_failures and all_failed and len(kinds) == 1:
        kind = next(iter(kinds)).value.replace("_", " ")
        return "same failure", f"its last {len(last)} trials failed in the same way ({kind})"
    had_its_turn = state.stalls > 0 and len(recent) < len(judged_all)
    patience = rules.patience_again if had_its_turn else rules.patience
    idle = list(takewhile(lambda judged: not judged.improved, reversed(recent)))
    if sum(1.0 if judged.item.is_own_idea else 0.5 for judged in idle) >= patience:
        how = "trial" if len(idle) == 1 else f"{len(idle)} trials"
        return "no improvement", f"its last {how} did not improve beyond the noise"
    return None


def overrules_left(view: SearchView, rules: ArbiterSettings) -> int:
    """How often the LLM may still overrule the surrogate: each that paid gives one back and one more."""
    judged = judge_trials(view)
    paid = sum(j.item.is_overrule and j.improved for j in judged)
    return rules.overrules + 2 * paid - len(overruled_rows(view))


def overruled_rows(view: SearchView) -> frozenset[int]:
    """Rows that the LLM chose against the surrogate and that were taken up: what a stall drops from a queue is free."""
    taken = view.taken_N
    rows = (
        view.space.row(item.config) for turn in past_turns(view.remarks) for item in turn.submitted if item.is_overrule
    )
    return frozenset(row for row in rows if row is not None and taken[row])


def has_improved_since(view: SearchView, trial: int) -> bool:
    """Whether one of the LLM's trials from that number on was an improvement."""
    return any(judged.improved for judged in judge_trials(view) if judged.observation.trial >= trial)


def queued(view: SearchView) -> tuple[PastTurn, list[SubmittedConfig]] | None:
    """What the latest turn submitted and is neither measured nor running; None where there is nothing."""
    turns = past_turns(view.remarks)
    if not turns:
        return None
    seen = {o.config.digest for o in view.observations}
    waiting = []
    for item in turns[-1].submitted:
        row = view.space.row(item.config)
        if row is not None and row not in view.closed and item.config.digest not in seen:
            waiting.append(item)
    return (turns[-1], waiting) if waiting else None
