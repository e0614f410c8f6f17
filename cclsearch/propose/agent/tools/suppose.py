"""The look-up `suppose`: what the surrogate would predict if corrections were certain, and the closed form anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value
from cclsearch.propose.agent.memory.history import past_turns
from cclsearch.propose.agent.memory.turn_feedback import read_lessons, suppose
from cclsearch.propose.agent.prompt.correction_lines import compare
from cclsearch.propose.agent.prompt.row_facts import name_largest
from cclsearch.propose.agent.tools.configs import CallError, format_config, read_value
from cclsearch.propose.base import SearchView
from cclsearch.propose.bayes.corrections import START
from cclsearch.propose.bayes.mixture import weigh_labels
from cclsearch.propose.bayes.snapshot import find_chances
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.propose.events import LlmTurn
from cclsearch.propose.warm_start.apply import apply_earlier
from cclsearch.space.table import space_from_rows
from cclsearch.stats.closed_form import predictor_of

MAX_SUPPOSED = 8
"""Configurations of one call."""
NUM_FIRST = 5
"""First choices that are named."""


def describe_supposed(view: SearchView, arguments: Mapping[str, Any]) -> str:
    """Return what would change if the arguments' corrections, doubts and causes of crashes were certain, in lines."""
    lessons, problems = read_lessons(arguments, view)
    before, after = fit_posterior(view), fit_posterior(suppose(view, lessons))
    if before is None or after is None:
        return "every configuration was tried"
    lines = list(problems)
    if any(lessons[name] for name in ("corrections", "doubts", "memory_crashes")):
        lines.append(f"now -> if so: {compare(view, before, after)}")
        lines += _describe_start(view, lessons) if lessons["corrections"] else []
        lines += _list_first(view, after)
    configs = arguments.get("configurations")
    lines += [
        _predict(view, before, after, raw) for raw in (configs if isinstance(configs, list) else [])[:MAX_SUPPOSED]
    ]
    return "\n".join(lines)


def _describe_start(view: SearchView, lessons: Mapping[str, Any]) -> list[str]:
    """Return the weight with which each correction would begin, which trials that it contradicts make smaller."""
    number = max((turn.turn for turn in past_turns(view.events)), default=0) + 1
    last = max((o.trial for o in view.observations), default=0)
    said = LlmTurn(turn=number, corrections=lessons["corrections"], last_seen=last)
    posterior = fit_posterior(replace(view, events=(*view.events, said)))
    shares = () if posterior is None else (posterior.models.primary.shares, posterior.models.feasibility.shares)
    own = f"turn {number}: "
    found = [(label.removeprefix(own), w) for each in shares for label, w in weigh_labels(each).items() if own in label]
    named = ", ".join(f"{label} {weight:.2f}" for label, weight in found) or "0: the trials so far contradict it"
    return [f"recorded with `correct`, it would begin with the weight {named} (at most {START:g} for all together)"]


def _list_first(view: SearchView, posterior: CandidatePosterior) -> list[str]:
    chances = np.full(len(posterior.rows_m), np.nan) if posterior.best is None else find_chances(posterior)
    order = np.argsort(view.primary.sign * posterior.value_m if posterior.best is None else -chances, kind="stable")
    return ["the likeliest to win then:"] + [
        f"  ({format_config(view.space, view.space.config(int(posterior.rows_m[m])))}) {_show(view, posterior, m)}"
        + (f", P(wins) {chances[m]:.3f}" if posterior.best is not None else "")
        for m in order[:NUM_FIRST].tolist()
    ]


def _show(view: SearchView, posterior: CandidatePosterior, m: int) -> str:
    memory = f", {posterior.memory_gib_m[m]:.3g} GiB" if np.isfinite(posterior.memory_gib_m[m]) else ""
    return f"{view.primary.show(float(posterior.value_m[m]))}{memory}, P(fits) {posterior.p_fits_m[m]:.2f}"


def _predict(view: SearchView, before: CandidatePosterior, after: CandidatePosterior, raw: object) -> str:
    """Return the predictions of a configuration; outside the space, the closed form with what the trials taught it."""
    try:
        config = _read_any(view, raw)
    except CallError as error:
        return str(error)
    name, row = format_config(view.space, config), view.space.row(config)
    at = [np.flatnonzero(posterior.rows_m == row) for posterior in (before, after)]
    if row is not None and all(map(len, at)):
        shown = [_show(view, each, int(m[0])) for each, m in zip((before, after), at, strict=True)]
        return f"{name}: " + (" -> ".join(shown) if shown[0] != shown[1] else shown[0])
    where = "in the search space" if row is not None else "not in the search space"
    try:
        return f"{name} ({where}): {_compute(view, after, config)}"
    except (UserError, ValueError, ArithmeticError, LookupError) as error:
        return f"{name} ({where}): the closed form cannot be computed: {one_line(str(error), 160)}"


def _read_any(view: SearchView, raw: object) -> Config:
    """Return the configuration that was meant, with values that no choice has; raises CallError."""
    if not isinstance(raw, Mapping):
        raise CallError(f"a configuration must be an object of knobs; got {one_line(repr(raw), 80)}")
    known = {knob.name: knob for knob in view.space.knobs}
    if unknown := [name for name in raw if name not in known]:
        raise CallError(f"unknown knob {one_line(str(unknown[0]), 40)!r}; the knobs are {', '.join(known)}")
    values: dict[str, Value] = {}
    for name, knob in known.items():
        given = raw.get(name, knob.choices[0])
        chosen = read_value(knob, given)
        is_value = isinstance(given, str) or (isinstance(given, int | float) and abs(given) < math.inf)
        if chosen is None and not (is_value and (isinstance(given, str) or not knob.is_numeric or given > 0)):
            raise CallError(f"{name} must be a number above 0, a text or a boolean; got {one_line(repr(given), 60)}")
        values[name] = given if chosen is None else chosen
    return Config(values)


def _compute(view: SearchView, posterior: CandidatePosterior, config: Config) -> str:
    knobs = [
        replace(knob, choices=knob.choices if config[knob.name] in knob.choices else (*knob.choices, config[knob.name]))
        for knob in view.space.knobs
    ]
    space = space_from_rows(knobs, [config])
    predictor = apply_earlier(predictor_of(view.card, space), space, view.earlier)
    form, memory, row = predictor.forms.get(view.primary.name), predictor.memory, np.zeros(1, dtype=np.int64)
    if form is None:
        return "there is no closed form"
    theta = posterior.models.primary.most_likely.theta_P
    value = float(np.exp(form.metric.sign * form.log_cost(row)(theta)[0]))
    parts = [f"closed form, calibrated by the trials, without corrections: {form.metric.show(value)}"]
    parts += [f"of it {name_largest(form.split(theta), 0)}"] if form.split else []
    if memory is not None:
        gib = float(np.exp(memory.form.log_cost(row)(posterior.models.feasibility.memory.theta_P)[0]))
        parts.append(f"memory {gib:.3g} of {np.exp(memory.log_limit):.3g} GiB")
    return ", ".join(parts)
