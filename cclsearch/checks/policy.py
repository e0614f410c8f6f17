"""Runs a policy program over workloads: its choice, the surrogate's prediction for it, or why it is rejected."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.propose.agent.policy.inputs import environment_fields, workload_fields
from cclsearch.propose.agent.policy.runner import SandboxRunner
from cclsearch.propose.agent.prompt.surrogate_table import make_surrogate_table
from cclsearch.propose.base import SearchView
from cclsearch.space.build import build_space, explain_config
from cclsearch.space.framework import choose_framework


@dataclass(frozen=True)
class PolicyVerdict:
    """The result of one program on one workload."""

    workload: str
    config: Config | None
    is_legal: bool
    reasons: tuple[str, ...]
    """Reasons for a rejection; empty if the configuration is in the search space."""
    note: str = ""
    """Knobs that were left out or filled in."""
    fits: float | None = None
    """Predicted probability of fitting into memory."""
    slower: float | None = None
    """Ratio of the predicted primary metric to the best prediction that fits (how many times worse; 1: equal)."""
    best: str = ""
    """The best prediction, in words."""


def check_policy(program: str, workloads: Sequence[str], *, use_fewer: bool = False) -> list[PolicyVerdict]:
    """One verdict per workload, in order; raises UserError for an unknown workload.

    `use_fewer` also allows configurations with fewer accelerators than there are, like `run --use-fewer`.
    """
    cards = [load_card(name) for name in workloads]
    return [_check(program, card, use_fewer) for card in cards]


def _check(program: str, card: Card, use_fewer: bool) -> PolicyVerdict:
    try:
        card, framework = choose_framework(card)
        space = build_space(card, framework, use_fewer=use_fewer)
    except UserError as error:
        return PolicyVerdict(card.name, None, False, (f"no search space: {error}",))
    view = SearchView(card, space, (), frozenset(), budget_left=1, seed=0)
    table = make_surrogate_table(view)
    choice = SandboxRunner().choose(program, view, table)
    named = choice.config or choice.named
    row = space.row(choice.config) if choice.config else None
    if row is None:
        reasons: tuple[str, ...] = (_explain(choice.problem, view),) if choice.problem else ()
        if named is not None:
            full = {knob.name: named.get(knob.name, knob.choices[0]) for knob in space.knobs}
            verdicts = explain_config(card, framework, full, use_fewer=use_fewer)
            reasons = tuple(f"{v.rule}: {v.summary} ({v.detail})" for v in verdicts if v.ok is False) or reasons
        return PolicyVerdict(card.name, named, False, reasons)
    fitting = table.value_N[(table.fits_N >= 0.5) & np.isfinite(table.value_N)]
    best = view.primary.sign * min(view.primary.sign * fitting, default=0.0)
    value = float(table.value_N[row])
    slower = (value / best) ** view.primary.sign if best and np.isfinite(value) else None
    words = "the fastest predicted time" if view.primary.is_time else f"the best predicted {view.primary.words}"
    return PolicyVerdict(card.name, choice.config, True, (), choice.note, float(table.fits_N[row]), slower, words)


def _explain(problem: str, view: SearchView) -> str:
    """The problem, in one line if the program is written for another task than the card's."""
    found = re.search(r"KeyError: '?(\w+)'?\s*$", problem)
    if found is None or found[1] in {*workload_fields(view), *environment_fields(view.card, view.space)}:
        return problem
    return f"the program reads {found[1]!r}, which a card of task {view.card.task!r} does not have"


def describe_verdict(verdict: PolicyVerdict) -> list[str]:
    """Lines that show a verdict."""
    choice = "no configuration" if verdict.config is None else str(verdict.config)
    if verdict.is_legal:
        fits = f"P(fits) {verdict.fits:.2f}" if verdict.fits is not None else ""
        slower = f", {verdict.slower:.2f}x {verdict.best}" if verdict.slower is not None else ""
        note = f" ({verdict.note})" if verdict.note else ""
        return [f"{verdict.workload}: {choice}: in the search space, predicted {fits}{slower}{note}"]
    reasons = [line for reason in verdict.reasons for line in reason.splitlines()]
    return [f"{verdict.workload}: {choice}: rejected", *(f"    {reason}" for reason in reasons)]
