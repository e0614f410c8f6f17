"""Registries of named parts, and the plugins that add to them.

Each registry stands beside the protocol of what it holds; `cclsearch.plugins` offers all of them to other packages. A
package names a module under the entry-point group `cclsearch`; importing that module registers what it decorates.

A project does without a package: the Python files in its `metrics/` and `objectives/` are imported in the same way,
once `ccl-search trust` allows it. The built-in parts register in the same way; each registry names their modules, and
imports one when its name is asked for. A plugin that cannot be imported is left out as a whole: a `BrokenPlugin`
warning names it, and everything else works.
`docs/extending.md` describes each kind.
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from cclsearch.core.content import list_modules
from cclsearch.core.errors import BrokenPlugin, UserError
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.trust import find_owner, find_trusted

T = TypeVar("T")
C = TypeVar("C")

ENTRY_POINT_GROUP = "cclsearch"


class Plugin(NamedTuple):
    """A plugin: the module that an entry point of a package names, or a Python file of the project."""

    name: str
    """Its package and module, such as `my-package (my_package.launcher)`, or the file, such as `metrics/mine.py`."""
    problem: str = ""
    """Reason why the plugin is left out, in one line; empty if it was loaded."""
    remedy: str = "update it, or uninstall it"
    """Step that fixes the problem."""


class Registry(Generic[T]):
    """Named entries of one kind; a built-in module is imported when one of its names is asked for."""

    def __init__(
        self, kind: str, built_in: str | Mapping[str, str] = MappingProxyType({}), *, needs: tuple[str, ...] = ()
    ) -> None:
        """Make a registry of `built_in` names, each with the module that registers it.

        `MODULE:NAME` as `built_in` is such a mapping of a module that cannot be imported yet. Every entry must have the
        attributes `needs`.
        """
        self.kind = kind
        self._table = built_in
        self._needs = needs
        self._entries: dict[str, T] = {}
        self._sources: dict[str, str] = {}
        _REGISTRIES.append(self)

    @property
    def _built_in(self) -> Mapping[str, str]:
        if isinstance(self._table, str):
            module, name = self._table.split(":")
            self._table = getattr(importlib.import_module(module), name)
        return self._table  # type: ignore[return-value]  # the mapping that the text named

    def register(self, name: str) -> Callable[[C], C]:
        """Decorator: register a class, function or instance as `name`.

        Raises ValueError if the name is taken, and TypeError if the entry is not of the registry's kind.
        """

        def add(entry: C) -> C:
            missing = [need for need in self._needs if not hasattr(entry, need)]
            if missing:
                raise TypeError(f"the {self.kind} {name!r} has no {' and no '.join(missing)}")
            # A plugin may be the first to import a built-in module: what is built in says where it was written.
            home = getattr(entry, "function", entry).__module__  # of a class or its instance, or what a function became
            is_built_in = name in self._built_in and home == self._built_in[name]
            if name in self._built_in and not is_built_in:
                raise ValueError(f"the {self.kind} {name!r} is built in: another name is needed")
            if self._entries.get(name, entry) is not entry:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry  # type: ignore[assignment]
            self._sources[name] = "" if is_built_in else _loading
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry of that name; raises UserError that lists the known names."""
        found = self.find(name)
        if found is None:
            known = self.names()
            raise UserError(
                f"there is no {self.kind} {name!r}{guess_name(name, known)}; known: {', '.join(known)}"
                f"{describe_broken_plugins()}"
            )
        return found

    def find(self, name: str) -> T | None:
        """The entry of that name; None if there is none."""
        load_plugins()
        if name not in self._entries and name in self._built_in:
            importlib.import_module(self._built_in[name])
        return self._entries.get(name)

    def names(self) -> list[str]:
        """All names, sorted."""
        load_plugins()
        return sorted({*self._built_in, *self._entries})

    def entries(self) -> list[T]:
        """All entries in the order of their names; imports every module that has one."""
        return [self.get(name) for name in self.names()]

    def loaded(self) -> list[T]:
        """The entries whose modules are imported already."""
        return list(self._entries.values())

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
    """Import every plugin once, and return all of them; a warning names each one that is left out."""
    global _has_begun
    if not _has_begun:
        _has_begun = True
        for point in entry_points(group=ENTRY_POINT_GROUP):
            name = f"{point.dist.name if point.dist else 'an unknown package'} ({point.value})"
            place = Path(str(point.dist.locate_file("x"))).resolve() if point.dist else Path(sys.prefix, "x")
            # An empty part of PYTHONPATH is the working directory: what is there was not installed.
            if place.parent != Path.cwd().resolve() or find_trusted(place) is not None:
                _load_one(Plugin(name), point.load)
            else:
                _refuse(name, place)
        for path in list_modules():
            name = f"{path.parent.name}/{path.name}"
            if (real := find_trusted(path)) is not None:
                _load_one(Plugin(name, remedy=f"correct {str(path)!r}"), partial(_import_file, real))
            else:
                _refuse(name, path)
    return list(_PLUGINS.values())


def _refuse(name: str, path: Path) -> None:
    owner = find_owner(path)
    allow = f"`ccl-search trust {shlex.quote(str(owner))}` lets it run; look at it first"
    _report(Plugin(name, f"it is code of {str(owner)!r}, which is not trusted", allow))


def _load_one(plugin: Plugin, load: Callable[[], Any]) -> None:
    global _loading
    _loading, problem = plugin.name, ""
    try:
        load()
    except (Exception, SystemExit) as error:  # a plugin may raise anything, also the exit of a program
        is_ours = isinstance(error, ImportError) and (error.name or "").split(".")[0] == "cclsearch"
        problem = one_line(f"{'it needs an update' if is_ours else type(error).__name__}: {error}", 300)
    finally:
        _loading = ""
    _report(plugin._replace(problem=problem))


def _import_file(path: Path) -> None:
    """Import a file of a project under a name that no installed module has."""
    name = f"ccl_project_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # as dataclasses and pickle expect
    spec.loader.exec_module(module)


def describe_broken_plugins() -> str:
    """Return the end of "there is no X": the plugins that were left out; empty if none was."""
    broken = [plugin for plugin in _PLUGINS.values() if plugin.problem]
    return "".join(f"; the plugin {plugin.name} was left out: {plugin.problem}" for plugin in broken)


def _report(plugin: Plugin) -> None:
    """Note a plugin; if it has a problem, drop what it registered and warn once, in the main process only."""
    _PLUGINS[plugin.name] = plugin
    if not plugin.problem:
        return
    for registry in _REGISTRIES:
        registry._drop(plugin.name)
    from multiprocessing import parent_process

    if parent_process() is None:
        text = f"the plugin {plugin.name} is left out: {plugin.problem}; {plugin.remedy}"
        warnings.warn(text, BrokenPlugin, stacklevel=2)
