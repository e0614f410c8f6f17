"""Properties of each metric before a trial runs: the tasks', the trace toolkit's, and those of every task."""

from __future__ import annotations

import difflib

from cclsearch.card.task import TASKS
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import METRICS, NUM_ACCELERATORS, PEAK_MEMORY, Direction, MetricInfo
from cclsearch.core.registry import describe_broken_plugins
from cclsearch.scoring.trial_metric import TRIAL_METRICS


def result_metric(
    name: str, unit: str, direction: Direction, missing: str = "", *, is_positive: bool = True, **words: str
) -> MetricInfo:
    """A metric that a task derives from the result of its run script and the card."""
    return MetricInfo(
        name=name, unit=unit, direction=direction, source="result", missing=missing, is_positive=is_positive, **words
    )


_LOW, _HIGH = Direction.MINIMIZE, Direction.MAXIMIZE
_NO_MEMORY = "the run script reported no peak memory of the accelerator"
NO_ENERGY = "no power was recorded, so the run script reported no `energy_j`"

SIZE = result_metric(
    NUM_ACCELERATORS, "accelerators", _LOW, "the run script did not declare its world size", label="accelerators"
)
MEMORY = result_metric(
    PEAK_MEMORY, "GiB", _LOW, "the run script reported no peak memory", label="peak memory", heading="memory (GiB)"
)
HEADROOM = result_metric("memory_headroom_frac", "fraction", _HIGH, _NO_MEMORY, label="free memory", is_positive=False)
ENERGY = result_metric("energy_j", "J", _LOW, NO_ENERGY, label="energy", needs="energy_j")
GENERAL_METRICS = (SIZE, MEMORY, HEADROOM)
"""Metrics of every task, listed by it or not."""


def list_metrics(task: str | None = None) -> dict[str, MetricInfo]:
    """Name -> metric of that task, or of all tasks (of two with one name the first task's), and of every task."""
    found: dict[str, MetricInfo] = {}
    for name in TASKS.names() if task is None else [task]:
        for metric in (*TASKS.get(name).metrics, *GENERAL_METRICS):
            found.setdefault(metric.name, metric)
    return found


def find_metric(name: str, where: str, *, task: str | None = None, from_script: bool = False) -> MetricInfo:
    """Properties of that metric of the task (or of any) or of the traces; UserError (naming `where`) if unknown.

    With `from_script` any name is accepted: the run script reports it in `metrics` of its `result.json`.
    """
    own = list_metrics(task)
    if name in own:
        return own[name]
    if from_script:
        missing = f"the run script reported no `metrics.{name}`"
        return MetricInfo(name=name, unit=None, direction=None, source="script", missing=missing)
    by_code = TRIAL_METRICS.find(name)
    if by_code is not None:
        return by_code.info
    traced = METRICS.names()
    if name in traced:
        unit, better = (getattr(METRICS.get(name), field, None) for field in ("unit", "better"))
        direction = {"lower": _LOW, "higher": _HIGH}.get(str(better))
        missing = "the traces do not contain it"
        return MetricInfo(name=name, unit=unit, direction=direction, source="trace", missing=missing)
    known = [*own, *TRIAL_METRICS.names(), *sorted(set(traced) - set(own))]
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    if near and task:
        hint += f" Task {task!r} has {', '.join(own)}"
    raise UserError(
        f"{where}: there is no metric {name!r}; {hint} (a metric of your run script needs `source: script`)"
        f"{describe_broken_plugins()}"
    )
