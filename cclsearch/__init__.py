"""ccl-search: finds the fastest configuration for LLM training and serving on many accelerators.

The names in `__all__` are the Python API (`docs/python-api.md`); every other name is private. Each is imported when it
is first used, so that `import cclsearch` is fast.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""As that of `typing`, which is not imported: type checkers take it as true."""
if TYPE_CHECKING:
    from cclsearch.api.inputs import build_space, load_card, predict
    from cclsearch.api.result import BestTrial, SearchResult, open_run
    from cclsearch.api.searching import resume, search
    from cclsearch.api.traces import read_traces, score
    from cclsearch.core.errors import UserError
    from cclsearch.core.version import __version__
    from cclsearch.plugins import LAUNCHERS, METRICS, PROPOSERS, PROVIDERS, READERS, TASKS
    from cclsearch.scoring.objective import load_objective

__all__ = [
    "LAUNCHERS",
    "METRICS",
    "PROPOSERS",
    "PROVIDERS",
    "READERS",
    "TASKS",
    "BestTrial",
    "SearchResult",
    "UserError",
    "__version__",
    "build_space",
    "load_card",
    "load_objective",
    "open_run",
    "predict",
    "read_traces",
    "resume",
    "score",
    "search",
]
_MODULES = {
    "api.inputs": ("build_space", "load_card", "predict"),
    "api.result": ("BestTrial", "SearchResult", "open_run"),
    "api.searching": ("resume", "search"),
    "api.traces": ("read_traces", "score"),
    "core.errors": ("UserError",),
    "core.version": ("__version__",),
    "plugins": ("LAUNCHERS", "METRICS", "PROPOSERS", "PROVIDERS", "READERS", "TASKS"),
    "scoring.objective": ("load_objective",),
}
"""Module -> the names of the API in it."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Return a name of the API; its module is imported now."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Return the names of the API."""
    return sorted(__all__)
