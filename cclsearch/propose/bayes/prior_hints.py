"""Beliefs of the LLM about a framework ("the pipeline is slow", "zero_stage=0 is slow here"), and trials it doubts.

A belief about a part moves the prior mean of the part's log multipliers by at most one standard deviation of that
prior; one about a knob's value gives all configurations with that value a common factor, which the trials then
estimate. Both weigh half as much after every `HALF_LIFE` trials. So measurements override a belief, right or wrong,
unless it is repeated. A doubted measurement teaches the surrogate almost nothing and is made once more if possible.
Beliefs and doubts are kept in the ledger's LLM turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import FailureKind, format_knob_value
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.events import ArbiterMove, ArbiterPhase, LlmTurn, find_withdrawn
from cclsearch.propose.observations import observed_rows
from cclsearch.space.knobs import KNOBS, canonical_name
from cclsearch.space.table import Space
from cclsearch.stats.calibration import Prior, RowModel
from cclsearch.stats.closed_form import ClosedForm, MemoryForm, Predictor
from cclsearch.stats.kernel import Array

LEVELS: Mapping[str, float] = MappingProxyType(
    {"much_less": -1.0, "less": -0.5, "as_predicted": 0.0, "more": 0.5, "much_more": 1.0}
)
"""Cost of a part relative to the closed form -> shift of its prior, in standard deviations."""
HALF_LIFE = 3.0
"""Trials after which a belief has half its weight."""
MIN_WEIGHT = 0.05
"""A belief with less weight is forgotten."""
VALUE_FACTOR = math.log(2.0)
"""Log of the factor that `much_more` of a knob's value means."""
MAX_FACTOR = 2.0
"""A belief may also be a factor, from its reciprocal to this one."""
# Quantile at 1 %: the standard deviation of the belief's log is the log over it, so a belief is wrong in its direction
# with a probability of 1 %. A value that it calls slower stays below a chance of 2 % to win if it had less.
SURE = 2.33
"""Standard normal quantile that sets the certainty of a belief."""
MIN_SD = 1e-3
"""Minimum of that standard deviation."""
OF_MEMORY = "memory:"
"""Before KNOB=VALUE: the belief is about the memory of the configurations with that value."""
# The same 1 % as in `SURE`.
WAY_ODDS = math.log(99.0)
"""Log of the factor by which `much_more` of an alternative of `MemoryForm.undeclared` raises its odds."""
MAX_DOUBTED_SHARE = 0.2
"""Largest share of a search's finished trials that may be doubted; one in any case."""

PriorHints = Mapping[str, str]
"""Part, or KNOB=VALUE -> level, or a factor such as `x1.02`."""


def name_parts(predictor: Predictor) -> tuple[str, ...]:
    """Return the parts of the primary metric and of the memory, and the open ways, that beliefs may name."""
    return (*predictor.hint_parts, *predictor.memory_hint_parts, *name_ways(predictor.memory))


def name_ways(memory: MemoryForm | None) -> tuple[str, ...]:
    """Return the names of frameworks' alternatives that the space does not declare."""
    return () if memory is None else tuple(way for ways in memory.ways.values() for way in ways)


def name_value(knob: str, choice: object) -> str:
    """Return how a belief names a knob's value: `zero_stage=0`."""
    return f"{knob}={format_knob_value(choice)}"


def name_part(part: str) -> str:
    """Return the shown name of a belief's part: `stage imbalance`, but `zero_stage=0` unchanged."""
    return part if "=" in part else part.replace("_", " ")


def find_memory_value(space: Space, name: str) -> tuple[int, int] | None:
    """Return the same of `memory:KNOB=VALUE`, a belief about the memory of the configurations with that value."""
    return find_value(space, name.removeprefix(OF_MEMORY)) if name.startswith(OF_MEMORY) else None


def find_value(space: Space, name: str) -> tuple[int, int] | None:
    """Return the column of the knob and the code of the value that `KNOB=VALUE` names; None if the space lacks it."""
    key, _, _ = name.partition("=")
    for column, knob in enumerate(space.knobs):
        if knob.name == key and len(knob.choices) > 1:
            codes = [code for code, choice in enumerate(knob.choices) if name_value(key, choice) == name]
            return (column, codes[0]) if codes else None
    return None


def parse_hints(raw: object, view: SearchView) -> dict[str, str]:
    """Return the items `{"part": ..., "is": ...}` with a known part, or value, and a known level; ignores others."""
    items, parts = raw if isinstance(raw, list) else [], name_parts(view.predictor)
    found = {}
    for item in items[: len(parts) * len(LEVELS) + 20]:
        part, level = (item.get("part"), item.get("is")) if isinstance(item, Mapping) else (None, None)
        level = _read_level(level)
        if not isinstance(part, str) or level is None:
            continue
        if part in parts or _names_value(view, part):
            found[part] = level
    return found


def _read_level(raw: object) -> str | None:
    """Return a level's word unchanged, and a factor in words; None if it is neither."""
    if isinstance(raw, str) and raw in LEVELS:
        return raw
    try:
        factor = math.nan if isinstance(raw, bool) or not isinstance(raw, str | int | float) else float(raw)
    except (ValueError, OverflowError):
        return None
    return f"x{factor:.4g}" if 1 / MAX_FACTOR <= factor <= MAX_FACTOR else None


def _read_factor(level: str) -> float | None:
    """Return the log of a belief's factor; None if the belief is a word."""
    try:
        factor = float(level.removeprefix("x")) if level.startswith("x") else 0.0
    except ValueError:
        return None
    return math.log(factor) if 1 / MAX_FACTOR <= factor <= MAX_FACTOR else None


def parse_doubts(raw: object, view: SearchView) -> tuple[int, ...]:
    """Return the trials of this list that may be doubted and that no turn named, up to the allowed number.

    The doubt is about a ranked trial's measurement, or about memory as the cause of a crash with an unknown cause.
    """
    numbers = [n for n in raw if isinstance(n, int) and not isinstance(n, bool)] if isinstance(raw, list) else []
    named = _named_doubts(view)
    new = {o.trial for o in view.observations if _can_doubt(o) and o.trial in numbers} - set(named)
    return tuple(n for n in dict.fromkeys(numbers) if n in new)[: count_doubts_left(view)]


def _can_doubt(o: Observation) -> bool:
    return o.loss is not None or (o.failure is not None and o.failure.kind is FailureKind.CRASHED)


def count_doubts_left(view: SearchView) -> int:
    """Return how many further trials may be doubted now."""
    return max(0, max(1, int(MAX_DOUBTED_SHARE * len(view.observations))) - len(_named_doubts(view)))


@dataclass(frozen=True)
class ActiveHint:
    """The latest belief about a part or a value, with its present weight."""

    level: str
    weight: float
    """1 when it was given, 0.5 after `HALF_LIFE` trials."""

    @property
    def log_factor(self) -> float:
        """Return the log of the factor that it means for a knob's value, times its weight."""
        factor = _read_factor(self.level)
        return self.weight * (VALUE_FACTOR * LEVELS[self.level] if factor is None else factor)

    @property
    def log_odds(self) -> float:
        """Return the log of the factor that it means for the odds of an undeclared way, times its weight."""
        factor = _read_factor(self.level)
        shift = LEVELS[self.level] * WAY_ODDS if factor is None else factor
        return self.weight * shift

    def find_shift(self, sd: float) -> float:
        """Shift of a multiplier's prior in its standard deviations, with its weight."""
        factor = _read_factor(self.level)
        return self.weight * (LEVELS[self.level] if factor is None else factor / max(sd, MIN_SD))


def collect_hints(view: SearchView) -> dict[str, ActiveHint]:
    """Return the latest belief about each part and value since the last stall, with its present weight."""
    hints: dict[str, ActiveHint] = {}
    withdrawn = find_withdrawn(view.events)
    for event in view.events:
        if isinstance(event, ArbiterMove) and event.after.phase is ArbiterPhase.FALLBACK:
            hints.clear()
        if isinstance(event, LlmTurn) and event.turn not in withdrawn:
            weight = 0.5 ** (max(0, len(view.observations) - event.num_seen) / HALF_LIFE)
            hints |= {
                part: ActiveHint(level, weight)
                for part, level in event.beliefs.items()
                if level in LEVELS or _read_factor(level) is not None
            }
    parts = name_parts(view.predictor)
    return {
        part: hint
        for part, hint in hints.items()
        if hint.weight >= MIN_WEIGHT and (part in parts or _names_value(view, part))
    }


def _names_value(view: SearchView, part: str) -> bool:
    """Whether a belief's part is a value of a knob, or its memory if the task predicts memory."""
    if part.startswith(OF_MEMORY):
        return view.predictor.memory is not None and find_memory_value(view.space, part) is not None
    return find_value(view.space, part) is not None


def find_doubted(view: SearchView) -> frozenset[int]:
    """Return the trials that the LLM doubts and whose configuration did not run again since."""
    named = _named_doubts(view)
    if not named:
        return frozenset()
    runs = Counter(observed_rows(view.observations).tolist())
    doubted = (o for o in view.observations if o.trial in named)
    return frozenset(o.trial for o in doubted if o.row is None or runs[o.row] == 1)


def _named_doubts(view: SearchView) -> tuple[int, ...]:
    """Return all trials that turns of this search doubted, in their order."""
    named = (number for event in view.events if isinstance(event, LlmTurn) for number in event.doubts)
    return tuple(dict.fromkeys(named))


def without_latest(view: SearchView) -> SearchView:
    """Return the view without the beliefs and doubts of its latest turn."""
    last = max((n for n, event in enumerate(view.events) if isinstance(event, LlmTurn)), default=-1)
    events = tuple(
        event.model_copy(update={"beliefs": {}, "doubts": ()}) if n == last else event
        for n, event in enumerate(view.events)
    )
    return replace(view, events=events)


def _keep_beliefs(view: SearchView, is_kept: Callable[[str], bool]) -> SearchView:
    """Return the view with these beliefs of its turns alone."""
    events = tuple(
        event.model_copy(update={"beliefs": {part: level for part, level in event.beliefs.items() if is_kept(part)}})
        if isinstance(event, LlmTurn)
        else event
        for event in view.events
    )
    return replace(view, events=events)


def without_guesses(view: SearchView) -> SearchView:
    """Return the view without beliefs about values that no measured trial has, of knobs that a closed form knows.

    The view itself if there is none. Nothing measured speaks for such a belief, so it does not end a search; a knob
    without a closed form has nothing else to go by.
    """
    tried = np.array([o.row for o in view.observations if o.row is not None and o.value(view.primary.name)], dtype=int)

    def is_guess(part: str) -> bool:
        found = find_value(view.space, part)
        if found is None or canonical_name(view.space.knobs[found[0]].name) not in KNOBS:
            return False
        has_N = (view.space.codes_NK[:, found[0]] == found[1]) & ~view.space.is_idle_N(found[0])
        return not has_N[tried].any()

    guesses = {part for part in collect_hints(view) if is_guess(part)}
    return _keep_beliefs(view, lambda part: part not in guesses) if guesses else view


def apply_hints(predictor: Predictor, view: SearchView) -> Predictor:
    """Return the predictor with priors shifted by the beliefs that proposers gave in this search."""
    hints = collect_hints(view)
    if not hints:
        return predictor
    form = _shift(predictor.form(view.primary), predictor.hint_parts, hints)
    values = {part: found for part in hints if (found := find_value(view.space, part))}
    form = _add_values(form, view.space, hints, values)
    memory = predictor.memory
    if memory is not None:
        own = {part: found for part in hints if (found := find_memory_value(view.space, part))}
        of_memory = _shift(memory.form, predictor.memory_hint_parts, hints)
        form_of_memory = _add_values(of_memory, view.space, hints, own)
        memory = replace(memory, form=form_of_memory, believed=_weigh_ways(memory, hints))
    return replace(predictor, forms={**predictor.forms, view.primary.name: form}, memory=memory)


def _weigh_ways(memory: MemoryForm, hints: Mapping[str, ActiveHint]) -> Mapping[tuple[str, float], float]:
    """Return the addition of the beliefs to the log odds of each alternative, by its multiplier and log multiplier."""
    return {
        (name, value): hints[label].log_odds
        for name, labels in memory.ways.items()
        for label, (value, _) in zip(labels, memory.undeclared[name], strict=True)
        if label in hints
    }


def _shift(form: ClosedForm, parts: Mapping[str, Mapping[str, float]], hints: Mapping[str, ActiveHint]) -> ClosedForm:
    """Return the form with its prior means shifted; several beliefs about a multiplier move it by at most one sd."""
    shift_P = np.zeros(len(form.multipliers))
    for part, hint in hints.items():
        for name, sign in parts.get(part, {}).items():
            index = form.multipliers.index(name)
            shift_P[index] += sign * hint.find_shift(float(form.prior.sd_P[index]))
    if not shift_P.any():
        return form
    mean_P = form.prior.mean_P + np.clip(shift_P, -1.0, 1.0) * form.prior.sd_P
    return replace(form, prior=replace(form.prior, mean_P=mean_P))


def _add_values(
    form: ClosedForm, space: Space, hints: Mapping[str, ActiveHint], values: Mapping[str, tuple[int, int]]
) -> ClosedForm:
    """Return the form with a factor for the rows in which each of these values (belief -> column and code) has an
    effect.
    """
    # With dp=1, `zero_stage=0` and `zero_stage=1` are the same run.
    if not values:
        return form
    member_KN = np.array(
        [(space.codes_NK[:, column] == code) & ~space.is_idle_N(column) for column, code in values.values()]
    )
    shift_K = np.array([hints[part].log_factor for part in values])
    sd_K = np.maximum(np.abs(shift_K) / SURE, MIN_SD)
    return _add_factors(form, tuple(values), member_KN, shift_K, sd_K)


def _add_factors(form: ClosedForm, names: tuple[str, ...], member_KN: Array, shift_K: Array, sd_K: Array) -> ClosedForm:
    """Return the form with one more multiplier per name: of the cost of the rows that are its members."""
    size, base, split = len(form.multipliers), form.log_cost, form.split

    def log_cost(rows: NDArray[np.int64]) -> RowModel:
        plain, member_Km = base(rows), member_KN[:, rows].astype(np.float64)
        return lambda theta: np.asarray(plain(theta[..., :size]) + theta[..., size:] @ member_Km)

    def split_all(theta_P: Array) -> Mapping[str, Array]:
        assert split is not None
        factor_N = np.exp(theta_P[size:] @ member_KN)
        return {part: cost_N * factor_N for part, cost_N in split(theta_P[:size]).items()}

    def extend(prior: Prior) -> Prior:
        mean_P, sd_P = np.concatenate([prior.mean_P, shift_K]), np.concatenate([prior.sd_P, sd_K])
        return replace(prior, mean_P=mean_P, sd_P=sd_P, num_added=prior.num_added + len(names))

    return replace(
        form,
        multipliers=(*form.multipliers, *names),
        prior=extend(form.prior),
        log_cost=log_cost,
        split=split_all if split else None,
        unlearned=extend(form.unlearned) if form.unlearned else None,
    )
