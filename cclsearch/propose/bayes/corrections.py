"""Corrections of the prediction by the LLM ("the pipeline costs 1.4 times as much here"), each one more hypothesis.

A correction gives the cost, or the memory, of each configuration a factor: of a part of the closed form, of a knob's
value, or by a program that computes the parts anew. The surrogate's mixture holds the closed form without any, with
each, and with all of them. A correction begins with a small weight. Trials that its author had not seen raise or lower
it, by their likelihood with it against that without it. Those that its author had seen can only lower it: to fit them
proves nothing. Corrections, doubts and causes of crashes are kept in the ledger's LLM turns.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from cclsearch.core.values import FailureKind, format_knob_value
from cclsearch.propose.agent.policy.inputs import environment_fields, hide_origin, workload_fields
from cclsearch.propose.agent.policy.sandbox import SandboxError, run_correction
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.mixture import Variant, shift_form, shift_loads
from cclsearch.propose.events import Correction, LlmTurn, find_withdrawn
from cclsearch.propose.observations import observed_rows
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import ClosedForm, Predictor
from cclsearch.stats.kernel import Array

# One promising row is worth a trial, and one trial that refutes it ends it (`benchmarks/agent.md`).
START = 0.2
"""Weight of all corrections together before any trial that their author had not seen."""
MAX_ACTIVE = 4
"""Corrections that count at a time, the latest ones."""
MAX_FACTOR = 100.0
"""Largest factor of a part, or of a value; the smallest is its reciprocal."""
MAX_SHIFT = float(np.log(10.0))
"""Log of the largest factor by which a correction changes a configuration."""
MAX_PROGRAM_ROWS = 20_000
"""Configurations whose prediction a program corrects; of a larger space, those that the closed form predicts best."""
OF_MEMORY = "memory:"
"""Before a part, or KNOB=VALUE: the correction is of the memory."""
WHOLE = "all"
"""Name of the whole cost, or memory, in place of a part."""
MAX_DOUBTED_SHARE = 0.2
"""Largest share of a search's finished trials that may be doubted; one in any case."""


class CorrectionError(Exception):
    """A correction that cannot be applied; the message is for its author."""


@dataclass(frozen=True)
class ActiveCorrection:
    """A correction that counts now."""

    turn: int
    correction: Correction
    last_seen: int
    """Largest number of a trial that its author had seen."""

    @property
    def label(self) -> str:
        """`turn 3: pipeline x1.4`."""
        return f"turn {self.turn}: {self.correction.describe()}"


def collect_corrections(view: SearchView) -> list[ActiveCorrection]:
    """Return the latest corrections, oldest first: one of each part, without those that were withdrawn."""
    withdrawn = find_withdrawn(view.events)
    found: dict[str, ActiveCorrection] = {}
    for event in view.events:
        if isinstance(event, LlmTurn) and event.turn not in withdrawn:
            for one in event.corrections:
                found.pop(one.part or one.program, None)
                found[one.part or one.program] = ActiveCorrection(event.turn, one, event.last_seen)
    return list(found.values())[-MAX_ACTIVE:]


def find_variants(view: SearchView, predictor: Predictor) -> tuple[tuple[Variant, ...], tuple[Variant, ...]]:
    """Return the variants of the primary metric's form and of the memory's: one correction each, and all of them."""
    active = [(one, _shift_or_none(view, predictor, one.correction)) for one in collect_corrections(view)]
    found: list[tuple[Variant, ...]] = []
    for at in (0, 1):
        own = [(one, shifts[at]) for one, shifts in active if shifts[at].any()]
        sets = [[pair] for pair in own] + ([own] if len(own) > 1 else [])
        # half of the weight is that of all together
        odds = START / (1 - START) * (np.array([0.5 / len(own)] * len(own) + [0.5]) if len(own) > 1 else np.ones(1))
        found.append(
            tuple(
                Variant(
                    tuple(one.label for one, _ in pairs),
                    np.clip(np.sum([shift_N for _, shift_N in pairs], axis=0), -MAX_SHIFT, MAX_SHIFT),
                    float(np.log(share)),
                    max(one.last_seen for one, _ in pairs),
                )
                for pairs, share in zip(sets, odds, strict=False)
            )
        )
    return found[0], found[1]


def apply_supposed(view: SearchView, predictor: Predictor) -> Predictor:
    """Return the predictor with the view's supposed corrections, as certain."""
    shifts = [_shift_or_none(view, predictor, one) for one in view.supposed]
    if not shifts:
        return predictor
    cost_N, memory_N = (np.clip(np.sum(each, axis=0), -MAX_SHIFT, MAX_SHIFT) for each in zip(*shifts, strict=True))
    memory, forms = predictor.memory, {view.primary.name: shift_form(predictor.form(view.primary), cost_N)}
    shifted = memory and replace(memory, form=shift_form(memory.form, memory_N))
    forms = {**predictor.forms, **(forms if cost_N.any() else {})}
    loads = predictor.loads and shift_loads(predictor.loads, cost_N)
    return replace(predictor, forms=forms, memory=shifted, loads=loads)


def _shift_or_none(view: SearchView, predictor: Predictor, correction: Correction) -> tuple[Array, Array]:
    """Return the shifts; zeros for a correction that cannot be applied now, such as one of a knob that is gone."""
    try:
        return find_shifts(view, predictor, correction)
    except CorrectionError:
        return np.zeros(len(view.space)), np.zeros(len(view.space))


def find_shifts(view: SearchView, predictor: Predictor, correction: Correction) -> tuple[Array, Array]:
    """(N,) log factor of each row's cost and (N,) of its memory; raises CorrectionError if it changes nothing."""
    cost, memory = _split(predictor.form(view.primary), len(view.space)), _split_memory(predictor, len(view.space))
    if correction.program:
        return _run(view, correction.program, cost, memory)
    name, of_memory = correction.part.removeprefix(OF_MEMORY), correction.part.startswith(OF_MEMORY)
    name = name if "=" in name else name.replace("_", " ")
    parts = memory if of_memory else cost
    total_N = np.sum(list(parts.values()), axis=0)
    if name in parts or name == WHOLE:
        part_N = total_N if name == WHOLE else parts[name]
        shift_N = np.log1p(part_N / total_N * (correction.factor - 1))
    elif (value := find_value(view.space, name)) is not None and parts:
        # with dp=1, `zero_stage=0` and `zero_stage=1` are the same run
        has_N = (view.space.codes_NK[:, value[0]] == value[1]) & ~view.space.is_idle_N(value[0])
        shift_N = np.where(has_N, np.log(correction.factor), 0.0)
    else:
        known = ", ".join([*(part for part in cost), *(OF_MEMORY + part for part in memory)])
        raise CorrectionError(f"{correction.part!r} is not a part, nor a value of a knob; the parts are {known}")
    shift_N = np.clip(shift_N, -MAX_SHIFT, MAX_SHIFT)
    _require_change(view, shift_N)
    return (np.zeros_like(shift_N), shift_N) if of_memory else (shift_N, np.zeros_like(shift_N))


def _require_change(view: SearchView, *shifts_N: Array) -> None:
    open_N = np.ones(len(view.space), dtype=bool)
    open_N[observed_rows(view.observations)] = False
    if not any(np.abs(shift_N[open_N]).max(initial=0.0) > 1e-6 for shift_N in shifts_N):
        raise CorrectionError("it changes the prediction of no configuration without a trial")


def _split(form: ClosedForm, size: int) -> dict[str, Array]:
    """Return part -> (N,) its share of the cost before any trial."""
    if form.split is not None:
        return dict(form.split(form.prior.mean_P))
    return {WHOLE: np.exp(form.log_cost(np.arange(size))(form.prior.mean_P))}


def _split_memory(predictor: Predictor, size: int) -> dict[str, Array]:
    return _split(predictor.memory.form, size) if predictor.memory else {}


def _run(view: SearchView, program: str, cost: dict[str, Array], memory: dict[str, Array]) -> tuple[Array, Array]:
    """Return the shifts by a program, run once for the whole space; raises CorrectionError."""
    total_N = np.sum(list(cost.values()), axis=0)
    memory_N = np.sum(list(memory.values()), axis=0) if memory else np.ones(len(total_N))
    rows = np.sort(np.argsort(total_N, kind="stable")[:MAX_PROGRAM_ROWS])
    hidden = hide_origin(view)
    fields = {**workload_fields(hidden), **environment_fields(hidden.card, view.space)}
    card = json.dumps({name: value for name, value in fields.items() if name != "config_space"})
    inputs = [
        (
            dict(view.space.config(row)),
            {
                "time": {name: float(part_N[row]) for name, part_N in cost.items()},
                "memory": {name: float(part_N[row]) for name, part_N in memory.items()} or {WHOLE: 1.0},
            },
        )
        for row in rows.tolist()
    ]
    totals = _run_cached(program, json.dumps(inputs), card)
    if isinstance(totals, str):
        raise CorrectionError(totals)
    shifts = []
    for plain_N, own in zip((total_N, memory_N), np.array(totals).T, strict=True):
        shift_N = np.zeros(len(total_N))
        shift_N[rows] = np.clip(np.log(own / plain_N[rows]), -MAX_SHIFT, MAX_SHIFT)
        shifts.append(np.where(np.abs(shift_N) < 1e-9, 0.0, shift_N))
    _require_change(view, *shifts)
    return shifts[0], shifts[1]


@lru_cache(maxsize=8)
def _run_cached(program: str, inputs: str, card: str) -> tuple[tuple[float, float], ...] | str:
    """Return the totals of each row, or the error, by the sandbox; the same inputs are run once per process."""
    try:
        return tuple((float(a), float(b)) for a, b in run_correction(program, json.loads(inputs), json.loads(card)))
    except SandboxError as error:
        return str(error)


def find_value(space: Space, name: str) -> tuple[int, int] | None:
    """Return the column of the knob and the code of the value that `KNOB=VALUE` names; None if the space lacks it."""
    key, _, _ = name.partition("=")
    for column, knob in enumerate(space.knobs):
        if knob.name == key and len(knob.choices) > 1:
            codes = [n for n, choice in enumerate(knob.choices) if f"{key}={format_knob_value(choice)}" == name]
            return (column, codes[0]) if codes else None
    return None


def name_parts(predictor: Predictor) -> tuple[str, ...]:
    """Return the parts of the cost and of the memory that corrections may name."""
    own = [form.split(form.prior.mean_P) for form in predictor.forms.values() if form.split]
    memory = predictor.memory.form if predictor.memory else None
    of_memory = memory.split(memory.prior.mean_P) if memory and memory.split else {}
    return (*(part for parts in own for part in parts), *(OF_MEMORY + part for part in of_memory))


# doubts


def parse_doubts(raw: object, view: SearchView) -> tuple[int, ...]:
    """Return the trials of this list that may be doubted and that no turn named, up to the allowed number.

    The doubt is about a ranked trial's measurement, or about memory as the cause of a crash with an unknown cause.
    """
    numbers = read_numbers(raw)
    named = _named_doubts(view)
    new = {o.trial for o in view.observations if _can_doubt(o) and o.trial in numbers} - set(named)
    return tuple(n for n in dict.fromkeys(numbers) if n in new)[: count_doubts_left(view)]


def parse_crashes(raw: object, view: SearchView) -> tuple[int, ...]:
    """Return the crashed trials of this list, whose cause is not known."""
    crashed = {o.trial for o in view.observations if o.loss is None and _can_doubt(o)}
    return tuple(n for n in dict.fromkeys(read_numbers(raw)) if n in crashed)


def read_numbers(raw: object) -> list[int]:
    """Return the whole numbers of a list; none of anything else."""
    return [n for n in raw if isinstance(n, int) and not isinstance(n, bool)] if isinstance(raw, list) else []


def _can_doubt(o: Observation) -> bool:
    return o.loss is not None or (o.failure is not None and o.failure.kind is FailureKind.CRASHED)


def count_doubts_left(view: SearchView) -> int:
    """Return how many further trials may be doubted now."""
    return max(0, max(1, int(MAX_DOUBTED_SHARE * len(view.observations))) - len(_named_doubts(view)))


def find_doubted(view: SearchView) -> frozenset[int]:
    """Return the trials that the LLM doubts and whose configuration did not run again since."""
    named = _named_doubts(view)
    if not named:
        return frozenset()
    runs = Counter(observed_rows(view.observations).tolist())
    doubted = (o for o in view.observations if o.trial in named)
    return frozenset(o.trial for o in doubted if o.row is None or runs[o.row] == 1)


def find_memory_crashes(view: SearchView) -> frozenset[int]:
    """Return the crashed trials that the LLM takes for out of memory, unless it doubts that too."""
    named = {n for event in view.events if isinstance(event, LlmTurn) for n in event.memory_crashes}
    return frozenset(named - set(_named_doubts(view)))


def _named_doubts(view: SearchView) -> tuple[int, ...]:
    """Return all trials that turns of this search doubted, in their order."""
    named = (number for event in view.events if isinstance(event, LlmTurn) for number in event.doubts)
    return tuple(dict.fromkeys(named))
