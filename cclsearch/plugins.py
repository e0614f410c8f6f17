"""Registries of launchers, proposers, metrics and trace readers, which other packages can extend.

A package names a module under the entry-point group `cclsearch`; importing that module registers what it decorates:

    from cclsearch.plugins import LAUNCHERS

    @LAUNCHERS.register("my-cluster")
    class MyLauncher: ...

The built-in parts register in the same way; each registry names their modules.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from cclsearch.core.errors import UserError

T = TypeVar("T")
C = TypeVar("C")

ENTRY_POINT_GROUP = "cclsearch"
MOVED = {
    **{f"cclsearch.{name}": f"cclsearch.core.{name}" for name in ("errors", "values", "text", "redact", "yaml_file")},
    "cclsearch.hardware": "cclsearch.card.hardware",
    "cclsearch.propose.observation": "cclsearch.propose.observations",
    "cclsearch.propose.sampler": "cclsearch.propose.study.samplers",
    "cclsearch.propose.optuna_sampler": "cclsearch.propose.study.samplers",
}
"""Modules of earlier versions that plugins may import -> where they are now."""


class Registry(Generic[T]):
    """Named entries of one kind; built-in modules and plugins are imported at the first look-up."""

    def __init__(self, kind: str, *built_in: str) -> None:
        self.kind = kind
        self._built_in = built_in
        self._entries: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[C], C]:
        """Decorator: register a class or function as `name`; raises ValueError if the name is taken."""

        def add(entry: C) -> C:
            if name in self._entries and self._entries[name] is not entry:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry of that name; raises UserError that lists the known names."""
        self._load()
        if name not in self._entries:
            raise UserError(f"there is no {self.kind} {name!r}; known: {', '.join(self.names())}")
        return self._entries[name]

    def find(self, name: str) -> T | None:
        """The entry of that name; None if there is none."""
        self._load()
        return self._entries.get(name)

    def names(self) -> list[str]:
        """All names, sorted."""
        self._load()
        return sorted(self._entries)

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for module in self._built_in:
            importlib.import_module(module)
        for point in entry_points(group=ENTRY_POINT_GROUP):
            try:
                point.load()
            except ImportError as error:
                if (error.name or "").split(".")[0] != "cclsearch":
                    raise
                moved = MOVED.get(error.name or "")
                hint = f": it is `{moved}` now" if moved else "; docs/renames.md of the repository lists new names"
                raise UserError(f"the plugin {point.value!r} needs an update: {error}{hint}") from None


LAUNCHERS: Registry[Any] = Registry("launcher", "cclsearch.launch.builtin")
"""name -> class with `from_profile`; see `cclsearch.launch.base.Launcher`."""

PROPOSERS: Registry[Any] = Registry("sampler", "cclsearch.propose.builtin")
"""name -> factory; see `cclsearch.propose.base.Proposer`."""

METRICS: Registry[Any] = Registry("metric", "cclsearch.trace.metrics")
"""name -> metric over an event table; see `cclsearch.trace.metric`."""

READERS: Registry[Any] = Registry("trace reader", "cclsearch.trace.readers.builtin")
"""name -> reader of one trace format; see `cclsearch.trace.readers.base.Reader`."""

TASKS: Registry[Any] = Registry("task", "cclsearch.tasks.builtin")
"""name -> kind of workload; see `cclsearch.tasks.base.Task`."""
