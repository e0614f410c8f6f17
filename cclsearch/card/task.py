"""The view of a task that packages below `tasks/` have: its cards, recordings and search spaces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from cclsearch.card.fields import CardField
from cclsearch.card.model import Card
from cclsearch.core.metrics import MetricInfo
from cclsearch.core.registry import Registry


class DeclaredTask(Protocol):
    """The part of `cclsearch.tasks.base.Task` that a card, a recording and a search space ask for."""

    name: str
    metrics: tuple[MetricInfo, ...]
    primary: str
    objective: str | None
    primary_from: tuple[str, ...]
    card_fields: tuple[CardField, ...]
    columns: Mapping[str, str]
    loads: Mapping[str, str]
    needs_model: bool
    rules: tuple[str, ...]
    numbers: Mapping[str, Callable[[Card], int]]

    @property
    def primary_metric(self) -> MetricInfo:
        """The properties of the primary metric."""

    def complete_recorded(
        self, data: Mapping[str, Any], metrics: Mapping[str, float], accelerators: float
    ) -> dict[str, float]:
        """The metrics of a recorded row with the primary one."""

    def complete_recorded_work(self, work: dict[str, Any], loads: Sequence[Mapping[str, float]]) -> list[str]:
        """Add to `workload.data` what a recording's loads show, and return one line for each addition."""

    def describe_work(self, card: Card) -> str:
        """The card's work in one phrase."""


TASKS: Registry[DeclaredTask] = Registry(
    "task",
    {name: f"cclsearch.tasks.{name}.task" for name in ("command", "inference", "serving", "training")},
    needs=("metrics", "primary", "make_input"),
)
"""name -> kind of workload; see `cclsearch.tasks.base.Task`."""


def list_declared(wanted: Collection[str], read: Callable[[DeclaredTask], Iterable[str]]) -> set[str]:
    """Return names that tasks declare: of the imported tasks if these have all that is wanted, else of all tasks."""
    known = {name for task in TASKS.loaded() for name in read(task)}
    return known if known.issuperset(wanted) else {name for task in TASKS.entries() for name in read(task)}
