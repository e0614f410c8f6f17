"""Growth of the search space: checked, recorded in the ledger, and checked again when the ledger is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value, format_knob_value
from cclsearch.plan.workload import hash_space
from cclsearch.record.event import SpaceGrown
from cclsearch.run.folder import grow_spec
from cclsearch.run.spec import RunSpec
from cclsearch.space.build import build_space, resolve_knobs
from cclsearch.space.framework import load_framework
from cclsearch.space.opening import MAX_KNOBS, Extend, Opening, find_opening, find_openings, read_values
from cclsearch.space.table import Knob, Space

MAX_TIMES = 64
"""Maximum ratio of the space's size after all growth to its first size."""
MAX_ROWS = 2_000_000
"""Maximum number of configurations after growth, for a space of any size."""
MAX_GROWTHS = 8
"""Maximum number of growths in one search."""

Wanted = Mapping[str, Sequence[Value]]
"""Knob, variable or flag -> values to add."""


@dataclass(frozen=True)
class GrownSpace:
    """A growth that was checked, and the space with it."""

    event: SpaceGrown
    space: Space
    added: Mapping[str, tuple[Value, ...]]
    """Knob -> values that this growth adds to it; a new knob also has its neutral value."""

    def describe(self, before: int) -> str:
        """Return the additions in one line."""
        texts = [f"{name}={','.join(map(format_knob_value, values))}" for name, values in self.added.items()]
        return f"{'; '.join(texts) or 'levers'}: {before} -> {len(self.space)} configurations"


def level_of(spec: RunSpec) -> Extend:
    """Return the level of the LLM's additions in this search."""
    return Extend(str(spec.llm_options.get("extend") or Extend.OFF))


def list_openings(original: RunSpec, knobs: Sequence[Knob]) -> dict[str, Opening]:
    """Return the possible additions to a search that now has these knobs; none if it reads a recording."""
    if original.recording is not None:
        return {}
    closed = {knob.name for knob in (*original.card.knobs, *original.knobs)}
    environment = original.profile.environment
    return find_openings(
        original.card, load_framework(original.framework), knobs, closed=closed, environment=environment
    )


def _find(
    original: RunSpec, name: str, openings: Mapping[str, Opening], knobs: Sequence[Knob], level: Extend
) -> Opening:
    framework, place = load_framework(original.framework), original.profile.environment
    cores = original.card.hardware.host_cores
    return find_opening(name, openings, framework, knobs, level=level, environment=place, cores=cores)


def plan_growth(
    original: RunSpec, earlier: SpaceGrown | None, num_growths: int, wanted: Wanted, *, level: Extend, why: str = ""
) -> GrownSpace:
    """Return the space with these values, and the event for the ledger; records nothing.

    `original` is the search as it began, `earlier` its last growth. Raises UserError with each refused value and the
    reason.
    """
    if original.recording is not None:
        raise UserError(
            f"the search space of {original.run_id} is a recording: no choices can be added to it, since nothing runs"
        )
    if level is Extend.OFF:
        raise UserError("this search does not add to its search space (`--extend listed` at its start would)")
    if num_growths >= MAX_GROWTHS:
        raise UserError(f"the space has grown {num_growths} times, which is the limit of a search")
    if not wanted:
        raise UserError("name at least one knob with the values to add")
    spec, framework = grow_spec(original, earlier), load_framework(original.framework)
    knobs = resolve_knobs(spec.card, framework, spec.knobs, spec.use_fewer)
    choices, neutral = dict(earlier.choices if earlier else {}), dict(earlier.neutral if earlier else {})
    openings, added = list_openings(original, knobs), {}
    declared = {knob.name for knob in (*original.card.knobs, *original.knobs)}
    for name, values in wanted.items():
        if name in declared:
            raise UserError(f"the choices of {name} were given by the card, the profile or --knob, and stay so")
        opening = _find(original, name, openings, knobs, level)
        known = next((knob.choices for knob in knobs if knob.name == opening.knob), ())
        new = tuple(value for value in read_values(opening, values) if value not in known)
        if not known and opening.neutral is not None:
            neutral[opening.knob], known = opening.neutral, (opening.neutral,)
        choices[opening.knob] = (*known, *new)
        added[opening.knob] = new
    own = [name for name in neutral if not (spec.bases and name in {lever.name for lever in framework.levers})]
    if len(own) > MAX_KNOBS:
        raise UserError(f"a search may gain {MAX_KNOBS} knobs in all, and has {', '.join(own)} with these")
    event = SpaceGrown(choices=choices, neutral=neutral, bases=spec.bases, space_sha256="", space_size=0)
    return _build(original, spec, event, added, why)


def plan_levers(original: RunSpec, earlier: SpaceGrown | None, best: Sequence[Config]) -> GrownSpace:
    """Return the space with the framework's levers opened near these configurations; UserError if none is left."""
    spec, framework = grow_spec(original, earlier), load_framework(original.framework)
    given = {knob.name for knob in resolve_knobs(spec.card, framework, spec.knobs, spec.use_fewer)}
    choices, neutral = dict(earlier.choices if earlier else {}), dict(earlier.neutral if earlier else {})
    opened = [knob.resolve(spec.card) for knob in framework.levers if knob.name not in given and knob.suits(spec.card)]
    added = {knob.name: knob.choices[1:] for knob in opened if len(knob.choices) > 1}
    choices |= {knob.name: knob.choices for knob in opened if knob.name in added}
    neutral |= {knob.name: knob.choices[0] for knob in opened if knob.name in added}
    bases = tuple(dict.fromkeys((*spec.bases, *best)))
    event = SpaceGrown(choices=choices, neutral=neutral, bases=bases, space_sha256="", space_size=0)
    return _build(original, spec, event, added, f"levers, near the best {len(best)}")


def _build(original: RunSpec, before: RunSpec, event: SpaceGrown, added: Wanted, why: str) -> GrownSpace:
    limit = min(MAX_TIMES * original.space_size, max(MAX_ROWS, original.space_size))
    larger = grow_spec(original, event)
    space = build_space(larger.card, load_framework(larger.framework), larger.knobs, larger.use_fewer, larger.bases)
    if len(space) > limit:
        raise UserError(
            f"the space would have {len(space)} configurations; {limit} is the limit, {MAX_TIMES} times the"
            f" {original.space_size} that it began with: add fewer values"
        )
    if len(space) == before.space_size:
        raise UserError(
            f"the search space of {original.run_id} would stay as it is: no configuration with these choices"
        )
    grown = GrownSpace(event, space, {name: tuple(values) for name, values in added.items()})
    text = grown.describe(before.space_size) + (f" ({one_line(why, 300)})" if why else "")
    filled = {"space_sha256": hash_space(space), "space_size": len(space), "text": text}
    return GrownSpace(event.model_copy(update=filled), space, grown.added)


def require_growth(original: RunSpec, growth: SpaceGrown) -> None:
    """Raise UserError if the ledger adds to the space what no search may add: someone may have edited it."""
    framework = load_framework(original.framework)
    knobs = resolve_knobs(original.card, framework, original.knobs, original.use_fewer)
    openings = list_openings(original, knobs)
    level = max(level_of(original), Extend.LISTED, key=list(Extend).index)
    try:
        if original.recording is not None:
            raise UserError("a recording cannot grow")
        for name, choices in growth.choices.items():
            opening = _find(original, name, openings, knobs, level)
            known = next((knob.choices for knob in knobs if knob.name == name), ())
            if growth.neutral.get(name) != opening.neutral or opening.knob != name:
                raise UserError(f"{name} has not the neutral value {opening.neutral!r}")
            for value in choices:
                if value not in (*known, opening.neutral) and (reason := opening.refuse(value)):
                    raise UserError(f"{name} cannot be {one_line(repr(value), 60)}: {reason}")
    except UserError as error:
        raise UserError(
            f"the ledger of {original.run_id} adds to the search space what may not be added: {error}. Restore its"
            " ledger.jsonl, or start a new search"
        ) from None
