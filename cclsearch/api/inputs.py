"""Cards and search spaces, as users of the Python API name them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cclsearch.card import load
from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.core.values import Value, format_config, format_knob_value
from cclsearch.plan.warm_start import NONE, learn_from_trials
from cclsearch.space import build
from cclsearch.space.framework import choose_framework
from cclsearch.space.parse import parse_assignments
from cclsearch.space.table import Space

if TYPE_CHECKING:
    import pandas as pd

CardSource = Card | Mapping[str, Any] | str | os.PathLike[str]
"""A loaded card, the mapping that a card's YAML file would hold, a card's name, or the path of its file."""
Knobs = Mapping[str, Sequence[Value]]
"""Knob -> the choices that are searched: it is added to the framework's knobs, or limits the choices of one."""


def load_card(card: CardSource, changes: Mapping[str, Value] | None = None) -> Card:
    """Return the workload card with `changes` to its fields, as `--set` makes them (`{"batch_size": 64}`).

    Raises UserError that names every missing or invalid field.
    """
    sets = [f"{name}={format_knob_value(value)}" for name, value in (changes or {}).items()]
    if isinstance(card, str | os.PathLike):
        return load.load_card(os.fspath(card), sets=sets)
    if sets:
        raise UserError(f"changes ({', '.join(sets)}) need a card by its name or file: change the mapping itself")
    if not isinstance(card, Card | Mapping):
        raise UserError(f"a card must be a name, a file, a mapping or a loaded card, not {card!r}")
    return card if isinstance(card, Card) else load.card_from_mapping(card, str(card.get("name", "card")))


def read_knobs(knobs: Knobs | None) -> tuple[KnobDeclaration, ...]:
    """Return the knobs as the engine declares them; raises UserError for choices that are not a list."""
    for name, choices in (knobs or {}).items():
        is_list = isinstance(choices, Sequence) and not isinstance(choices, str | bytes) and bool(choices)
        if not is_list or not all(isinstance(value, Value) for value in choices):
            raise UserError(f"knobs: the choices of {name!r} must be a list of plain values, not {choices!r}")
    return tuple(KnobDeclaration(name=name, choices=tuple(choices)) for name, choices in (knobs or {}).items())


def build_space(
    card: CardSource, *, framework: str | None = None, knobs: Knobs | None = None, use_fewer: bool = False
) -> Space:
    """Return every configuration that the framework accepts for the card; raises UserError if there is none."""
    return _resolve(card, framework, knobs, use_fewer)[1]


def _resolve(card: CardSource, framework: str | None, knobs: Knobs | None, use_fewer: bool) -> tuple[Card, Space]:
    extra = read_knobs(knobs)
    loaded, rules = choose_framework(load_card(card), framework)
    build.require_known_knobs(extra, loaded, rules)
    return loaded, build.build_space(loaded, rules, extra, use_fewer)


def predict(
    card: CardSource,
    config: Mapping[str, Value] | None = None,
    *,
    top: int | None = 10,
    framework: str | None = None,
    knobs: Knobs | None = None,
    use_fewer: bool = False,
    learn_from: Sequence[str | os.PathLike[str]] | None = (),
    runs_folder: str | os.PathLike[str] | None = None,
) -> pd.DataFrame:
    """Return the predicted figures of the `top` best configurations, as `ccl-search predict`; None means all.

    `config` has values that the configurations must have. `learn_from` names runs and recordings; without, measured
    runs on the same cluster teach the prediction, and with None nothing does. Nothing runs: the column `provenance`
    says `simulated`.
    """
    import pandas as pd

    loaded, space = _resolve(card, framework, knobs, use_fewer)
    wanted = parse_assignments(config, space.knobs) if config else {}
    rows = np.flatnonzero(space.matching(wanted))
    if not len(rows):
        raise UserError(f"no configuration in the search space of {loaded.name} has {format_config(wanted)}")
    sources = [NONE] if learn_from is None else [os.fspath(each) for each in learn_from]
    learned = learn_from_trials(loaded, space, choose_framework(loaded)[1].name, sources, as_path(runs_folder))
    prediction, _ = learned.predict(rows)
    chosen = [int(row) for row in prediction.order(rows)[:top]]
    figures = [{**space.config(row), **prediction.describe(row), "provenance": "simulated"} for row in chosen]
    return pd.DataFrame(figures)


def as_path(folder: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder as a path; None stays None."""
    return None if folder is None else Path(folder).expanduser()
