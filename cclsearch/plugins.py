"""Registries of launchers, proposers, LLM providers, metrics, trace readers, tasks and trackers, for other packages.

A package names a module under the entry-point group `cclsearch`; importing that module registers what it decorates:

    from cclsearch.plugins import LAUNCHERS

    @LAUNCHERS.register("my-cluster")
    class MyLauncher: ...

The built-in parts register in the same way; each registry names their modules. A plugin that cannot be imported is left
out as a whole: a `BrokenPlugin` warning names it, and everything else works. `docs/extending.md` describes each kind.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from cclsearch.core.errors import BrokenPlugin, UserError
from cclsearch.core.text import guess_name, one_line

if TYPE_CHECKING:
    from cclsearch.launch.profile import LauncherFactory
    from cclsearch.propose.agent.providers.kind import ProviderKind
    from cclsearch.propose.base import ProposerFactory
    from cclsearch.tasks.base import Task
    from cclsearch.trace.metric import Metric
    from cclsearch.trace.readers.base import Reader
    from cclsearch.tracking.base import Tracker

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


class Plugin(NamedTuple):
    """An installed plugin: the module that an entry point names."""

    name: str
    """Its package and module, such as `my-package (my_package.launcher)`."""
    problem: str = ""
    """Why it is left out, in one line; empty if it was loaded."""


class Registry(Generic[T]):
    """Named entries of one kind; built-in modules and plugins are imported at the first look-up."""

    def __init__(self, kind: str, *built_in: str, needs: tuple[str, ...] = ()) -> None:
        """Make a registry whose entries must have the attributes `needs`."""
        self.kind = kind
        self._built_in = built_in
        self._needs = needs
        self._entries: dict[str, T] = {}
        self._sources: dict[str, str] = {}
        self._loaded = False
        _REGISTRIES.append(self)

    def register(self, name: str) -> Callable[[C], C]:
        """Decorator: register a class, function or instance as `name`.

        Raises ValueError if the name is taken, and TypeError if the entry is not of the registry's kind.
        """

        def add(entry: C) -> C:
            missing = [need for need in self._needs if not hasattr(entry, need)]
            if missing:
                raise TypeError(f"the {self.kind} {name!r} has no {' and no '.join(missing)}")
            source = _find_source()
            if name in self._entries and self._entries[name] is not entry:
                taken_by = self._sources[name]
                if source or not taken_by:
                    raise ValueError(f"{self.kind} {name!r} is registered twice")
                _report(Plugin(taken_by, f"the {self.kind} {name!r} is built in: another name is needed"))
            self._entries[name], self._sources[name] = entry, source  # type: ignore[assignment]
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry of that name; raises UserError that lists the known names."""
        self._load()
        if name not in self._entries:
            known = self.names()
            raise UserError(
                f"there is no {self.kind} {name!r}{guess_name(name, known)}; known: {', '.join(known)}"
                f"{describe_broken_plugins()}"
            )
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
        load_plugins()

    def _drop(self, source: str) -> None:
        """Remove what a plugin registered before it failed."""
        for name in [name for name, by in self._sources.items() if by == source]:
            del self._entries[name], self._sources[name]


_REGISTRIES: list[Registry[Any]] = []
_PLUGINS: dict[str, Plugin] = {}
"""Name -> plugin that was loaded or left out; None of them before the first look-up."""
_loading = ""
"""The plugin whose module is being imported; empty if none is."""
_has_begun = False


def load_plugins() -> list[Plugin]:
    """Import every installed plugin once, and return all of them; a warning names each one that is left out."""
    global _has_begun, _loading
    if not _has_begun:
        _has_begun = True
        for point in entry_points(group=ENTRY_POINT_GROUP):
            package = point.dist.name if point.dist else "an unknown package"
            _loading = f"{package} ({point.value})"
            try:
                plugin = Plugin(_loading, _load_point(point))
            finally:
                _loading = ""
            _report(plugin)
    return list(_PLUGINS.values())


def describe_broken_plugins() -> str:
    """Return what to add to "there is no X": the plugins that were left out; empty if none was."""
    broken = [plugin for plugin in _PLUGINS.values() if plugin.problem]
    return "".join(f"; the plugin {plugin.name} was left out: {plugin.problem}" for plugin in broken)


def _load_point(point: EntryPoint) -> str:
    """Import a plugin; returns why it must be left out, or an empty text."""
    try:
        point.load()
    except ImportError as error:
        if (error.name or "").split(".")[0] != "cclsearch":
            return one_line(f"{type(error).__name__}: {error}", 300)
        moved = MOVED.get(error.name or "")
        hint = f"it is `{moved}` now" if moved else "docs/renames.md of the repository lists new names"
        return f"it needs an update: {one_line(str(error), 300)}: {hint}"
    except (Exception, SystemExit) as error:  # a plugin may raise anything, also the exit of a program
        return one_line(f"{type(error).__name__}: {error}", 300)
    return ""


def _report(plugin: Plugin) -> None:
    """Note a plugin; if it has a problem, drop what it registered and warn once, in the main process only."""
    _PLUGINS[plugin.name] = plugin
    if not plugin.problem:
        return
    for registry in _REGISTRIES:
        registry._drop(plugin.name)
    from multiprocessing import parent_process

    if parent_process() is None:
        text = f"the plugin {plugin.name} is left out: {plugin.problem}; update it, or uninstall it"
        warnings.warn(text, BrokenPlugin, stacklevel=2)


def _find_source() -> str:
    """Return the plugin that registers something now; empty for the modules of this package.

    A plugin may be the first to import a built-in module: the nearest module in the call stack decides.
    """
    frame = sys._getframe(2) if _loading else None
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return "" if frame.f_globals.get("__name__", "").split(".")[0] == "cclsearch" else _loading
        frame = frame.f_back
    return _loading


LAUNCHERS: Registry[LauncherFactory] = Registry("launcher", "cclsearch.launch.builtin", needs=("from_profile",))
"""name -> class with `from_profile`; see `cclsearch.launch.base.Launcher`."""

PROPOSERS: Registry[ProposerFactory] = Registry("proposer", "cclsearch.propose.builtin", needs=("from_context", "role"))
"""name -> subclass of `cclsearch.propose.base.Proposer`, or another factory: samplers and strategies with an LLM."""

PROVIDERS: Registry[type[ProviderKind]] = Registry(
    "LLM provider", "cclsearch.propose.agent.providers.builtin", needs=("word", "key_name", "make_provider")
)
"""word of `--llm WORD:MODEL` -> subclass of `cclsearch.propose.agent.providers.kind.ProviderKind`."""

METRICS: Registry[Metric] = Registry("metric", "cclsearch.trace.metrics", needs=("unit", "summary", "function"))
"""name -> metric over an event table; registered by `cclsearch.trace.metric.metric`."""

READERS: Registry[type[Reader]] = Registry(
    "trace reader", "cclsearch.trace.readers.builtin", needs=("format", "claims", "read")
)
"""name -> reader of one trace format; see `cclsearch.trace.readers.base.Reader`."""

TASKS: Registry[Task] = Registry("task", "cclsearch.tasks.builtin", needs=("metrics", "primary", "make_input"))
"""name -> kind of workload; see `cclsearch.tasks.base.Task`."""

TRACKERS: Registry[type[Tracker]] = Registry("tracker", "cclsearch.tracking.builtin", needs=("from_place", "log_trial"))
"""word of `--log-to WORD:PLACE` -> subclass of `cclsearch.tracking.base.Tracker`."""
