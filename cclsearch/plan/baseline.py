"""The configuration that a user compares with: `--baseline tp=8,pp=1`, as a configuration of the search space."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config, Value, format_config
from cclsearch.space.build import explain_config
from cclsearch.space.framework import load_framework
from cclsearch.space.knobs import canonical_name, meaning_of
from cclsearch.space.parse import parse_assignments
from cclsearch.space.table import Space

OPTION = "--baseline"


def choose_baseline(
    text: str,
    space: Space,
    card: Card,
    framework: str | None,
    extra: tuple[KnobDeclaration, ...] = (),
    *,
    use_fewer: bool = False,
) -> Config:
    """Return the configuration of that text; knobs that it leaves out have their neutral value.

    `framework` is None for a recording, whose space has no rules. Raises UserError that names the rule that refuses it.
    """
    try:
        given = parse_assignments(text, space.knobs)
    except UserError as error:
        raise UserError(f"{OPTION}: {error}") from None
    rows = np.flatnonzero(space.matching(given))
    if not len(rows):
        raise UserError(f"{OPTION} {format_config(given)}: {_explain(given, card, framework, extra, use_fewer)}")
    if len(rows) > 1:
        open_knobs = [knob for knob in space.knobs if knob.name not in given]
        neutral = {knob.name: meaning_of(canonical_name(knob.name)).neutral for knob in open_knobs}
        row = space.row({knob.name: {**given, **neutral}[knob.name] for knob in space.knobs})
        if row is None:
            varied = [k.name for k in open_knobs if len({space.config(int(r))[k.name] for r in rows[:1000]}) > 1]
            raise UserError(
                f"{OPTION} {format_config(given)}: {len(rows)} configurations of the search space match;"
                f" give {' and '.join(varied)} too"
            )
        return space.config(row)
    return space.config(int(rows[0]))


def _explain(
    given: Mapping[str, Value],
    card: Card,
    framework: str | None,
    extra: tuple[KnobDeclaration, ...],
    use_fewer: bool,
) -> str:
    if framework is None:
        return "the recording has no such configuration"
    verdicts = explain_config(card, load_framework(framework), given, extra, use_fewer)
    refused = [
        f"rule {verdict.rule}: {verdict.detail} (required: {verdict.summary})"
        for verdict in verdicts
        if verdict.ok is False
    ]
    return "; ".join(refused) or "not in the search space for any values of the other knobs"
