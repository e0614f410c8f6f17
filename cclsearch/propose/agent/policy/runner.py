"""Policy programs: their run in the sandbox, and the configuration that they choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value
from cclsearch.propose.agent.policy.inputs import policy_inputs
from cclsearch.propose.agent.policy.knob_aliases import find_choice, find_knob
from cclsearch.propose.agent.policy.sandbox import SandboxError, SandboxLimits, run_policy
from cclsearch.propose.agent.prompt.surrogate_table import SurrogateTable
from cclsearch.propose.agent.tools.configs import format_config, nearest_rows
from cclsearch.propose.base import SearchView
from cclsearch.space.table import Space


@dataclass(frozen=True)
class PolicyChoice:
    """The configuration that a program chose, or the reason why there is none."""

    config: Config | None
    problem: str = ""
    """Reason why there is no configuration, for the program's author."""
    note: str = ""
    """Knobs that were left out or filled in."""
    named: Config | None = None
    """The knobs that it named, if they match no configuration of the search space."""


class PolicyRunner(Protocol):
    """Runs policy programs for `ToolHandlers`."""

    def choose(self, program: str, view: SearchView, table: SurrogateTable) -> PolicyChoice: ...


class SandboxRunner:
    """Runs policy programs in the sandbox."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()

    def choose(self, program: str, view: SearchView, table: SurrogateTable) -> PolicyChoice:
        """The configuration that the program chooses; it may be an old one."""
        try:
            raw = run_policy(program, *policy_inputs(view), limits=self._limits)
        except SandboxError as error:
            return PolicyChoice(None, str(error))
        return read_choice(view.space, raw, [int(row) for row in table.order])


def read_choice(space: Space, raw: dict[str, Any], preferred: list[int]) -> PolicyChoice:
    """The configuration that a program's dictionary means.

    Knobs of other search spaces are left out, and knobs that it does not name are filled in from the most promising
    configuration that matches it; the note lists both.
    """
    named: dict[str, Value] = {}
    ignored: list[str] = []
    for key, value in raw.items():
        knob = find_knob(space, key)
        if knob is None:
            ignored.append(one_line(str(key), 40))
            continue
        choice = find_choice(knob, value)
        if choice is None:
            got = one_line(repr(value), 60) + ("" if key == knob.name else f" (as {one_line(key, 40)!r})")
            return PolicyChoice(None, f"{knob.name} must be one of {list(knob.choices)}; got {got}")
        if named.get(knob.name, choice) != choice:
            return PolicyChoice(None, f"{knob.name} is given twice, as {named[knob.name]!r} and as {choice!r}")
        named[knob.name] = choice
    if not named:
        keys = ", ".join(knob.name for knob in space.knobs)
        return PolicyChoice(None, f"the program named no knob of this search space; the knobs are {keys}")
    filled = _fill(space, named, preferred)
    missing = [knob.name for knob in space.knobs if knob.name not in named and len(knob.choices) > 1]
    notes = [f"left out: {', '.join(ignored[:8])}"] if ignored else []
    added = ", ".join(f"{name}={filled[name]}" for name in missing) if filled else ""
    notes += [f"{added} {'was' if len(missing) == 1 else 'were'} added"] if added else []
    if filled is None:
        near = "; ".join(format_config(space, space.config(row)) for row in nearest_rows(space, named, preferred))
        chosen = Config(named)
        problem = f"not in the search space: {chosen}. Nearest untried configurations: {near or 'none'}"
        return PolicyChoice(None, problem, named=chosen)
    return PolicyChoice(filled, note="; ".join(notes))


def _fill(space: Space, named: dict[str, Value], preferred: list[int]) -> Config | None:
    match_N = space.matching(named)
    row = next((row for row in [*preferred, *np.flatnonzero(match_N).tolist()] if match_N[row]), None)
    return None if row is None else space.config(row)
