"""Registries of launchers, proposers, LLM providers, metrics, trace readers, tasks and trackers, for other packages.

A package names a module under the entry-point group `cclsearch`; importing that module registers what it decorates:

    from cclsearch.plugins import LAUNCHERS

    @LAUNCHERS.register("my-cluster")
    class MyLauncher: ...

Each registry is imported when its name is first used. `docs/extending.md` describes each kind.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
"""As that of `typing`, which is not imported: type checkers take it as true."""
if TYPE_CHECKING:
    from cclsearch.card.task import TASKS
    from cclsearch.core.metrics import METRICS
    from cclsearch.launch.profile import LAUNCHERS
    from cclsearch.propose.agent.providers.kind import PROVIDERS
    from cclsearch.propose.base import PROPOSERS
    from cclsearch.scoring.trial_metric import TRIAL_METRICS
    from cclsearch.trace.readers.base import READERS
    from cclsearch.tracking.base import TRACKERS

__all__ = ["LAUNCHERS", "METRICS", "PROPOSERS", "PROVIDERS", "READERS", "TASKS", "TRACKERS", "TRIAL_METRICS"]
_HOMES = {
    "LAUNCHERS": "launch.profile",
    "METRICS": "core.metrics",
    "PROPOSERS": "propose.base",
    "PROVIDERS": "propose.agent.providers.kind",
    "READERS": "trace.readers.base",
    "TASKS": "card.task",
    "TRACKERS": "tracking.base",
    "TRIAL_METRICS": "scoring.trial_metric",
}
"""Registry -> the module that has it, beside the protocol of its entries."""


def __getattr__(name: str) -> object:
    """Return a registry; its module is imported now."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"cclsearch.{_HOMES[name]}"), name)
    return found
