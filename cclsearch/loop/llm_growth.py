"""What the LLM of a search may add to its search space, and why a configuration is not in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value
from cclsearch.loop.growth import MAX_GROWTHS, level_of, list_openings, plan_growth
from cclsearch.propose.base import SearchView
from cclsearch.record.event import SpaceGrown
from cclsearch.run.folder import grow_spec
from cclsearch.run.spec import RunSpec
from cclsearch.space.build import explain_config
from cclsearch.space.framework import load_framework
from cclsearch.space.opening import Extend

NO_RECORDING = "nothing: this search reads a recording, where only the measured configurations exist"


class GrowingSpace:
    """Explains configurations of the space as it is now, and checks what the model asks to add; a `SpaceExtender`."""

    def __init__(self, original: RunSpec) -> None:
        """`original` is the search as it began, without later growth."""
        self._original = original
        self._level = level_of(original)
        self._growth: SpaceGrown | None = None

    def explain(self, config: Config) -> Sequence[str]:
        """The rules that a configuration violates, one line each."""
        spec = grow_spec(self._original, self._growth)
        framework = load_framework(spec.framework)
        verdicts = explain_config(spec.card, framework, config, spec.knobs, spec.use_fewer)
        return [f"{verdict.rule}: {verdict.summary} ({verdict.detail})" for verdict in verdicts if verdict.ok is False]

    def offers(self, view: SearchView) -> Sequence[str]:
        """What may be added now, one line each; empty if nothing may."""
        grown = self._read(view)
        if self._level is Extend.OFF:
            return []
        if self._original.recording is not None:
            return [NO_RECORDING]
        if len(grown) >= MAX_GROWTHS:
            return []
        framework = load_framework(self._original.framework)
        lines = [opening.describe() for opening in list_openings(self._original, view.space.knobs).values()]
        if self._level is Extend.ANY and framework.libraries:
            lines.append(
                f"any other variable or XLA flag of {', '.join(framework.libraries)} by its name, unless it loads code,"
                " names a place, or changes precision, hardware or the work; one that the framework does not know fails"
            )
        return lines

    def check(self, view: SearchView, wanted: Mapping[str, Sequence[Value]]) -> str:
        """What would be added, in one line; raises UserError that says what may not be, and why."""
        grown = self._read(view)
        if self._original.recording is not None:
            raise UserError(NO_RECORDING)
        planned = plan_growth(self._original, self._growth, len(grown), wanted, level=self._level)
        return one_line(planned.describe(len(view.space)), 400)

    def _read(self, view: SearchView) -> list[SpaceGrown]:
        grown = [event for event in view.events if isinstance(event, SpaceGrown)]
        self._growth = grown[-1] if grown else None
        return grown
