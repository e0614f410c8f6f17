"""The metrics that judging a trial derives: name, unit, which way is better, and what they come from.

Metrics of the trace toolkit are known by its own registry and may be used in an objective all the same.
"""

from __future__ import annotations

import difflib
from enum import StrEnum

from cclsearch.core.errors import UserError
from cclsearch.core.values import Model


class Direction(StrEnum):
    """Which way is better."""

    MINIMIZE = "minimize"
    MAXIMIZE = "maximize"


class MetricInfo(Model):
    """What is known of a metric before anything ran."""

    name: str
    unit: str | None
    """None where the toolkit's registry does not tell."""
    direction: Direction | None
    """None where either way may be wanted."""
    source: str
    """`result` (the run script's figures and the card), `trace`, or `script` (a figure of the script's own)."""
    missing: str = ""
    """What its absence means, for the message."""
    is_positive: bool = False
    """Whether it is above zero wherever it is measured."""


def _result(name: str, unit: str, direction: Direction, missing: str) -> MetricInfo:
    positive = name != "memory_headroom_frac"
    return MetricInfo(name=name, unit=unit, direction=direction, source="result", missing=missing, is_positive=positive)


_LOW, _HIGH = Direction.MINIMIZE, Direction.MAXIMIZE
_NO_TIMES = "the run script left no step times"
_NO_MEMORY = "the run script left no peak memory of the accelerator"
_NO_ENERGY = "no power was recorded, so the run script left no `energy_j`"

CATALOG: dict[str, MetricInfo] = {
    info.name: info
    for info in (
        _result("step_time_s", "s", _LOW, _NO_TIMES),
        _result("tokens_per_s", "tokens/s", _HIGH, _NO_TIMES),
        _result("tokens_per_s_per_accelerator", "tokens/s", _HIGH, _NO_TIMES),
        _result("samples_per_s", "sequences/s", _HIGH, _NO_TIMES),
        _result("mfu", "fraction", _HIGH, "the accelerator's peak or the model's FLOPs are not known"),
        _result("num_accelerators", "accelerators", _LOW, "the run script did not declare its world size"),
        _result("accelerator_seconds_per_mtoken", "accelerator-s/Mtoken", _LOW, _NO_TIMES),
        _result("peak_memory_gib", "GiB", _LOW, "the run script left no peak memory"),
        _result("memory_headroom_frac", "fraction", _HIGH, _NO_MEMORY),
        _result("energy_j_per_step", "J", _LOW, _NO_ENERGY),
        _result("energy_j_per_mtoken", "J/Mtoken", _LOW, _NO_ENERGY),
        _result("power_w", "W", _LOW, _NO_ENERGY),
    )
}
"""Name -> what is known of it. `Mtoken` is a million tokens; a sequence counts `seq_len` tokens."""

ENERGY_METRICS = frozenset(name for name, info in CATALOG.items() if info.missing == _NO_ENERGY)
"""What needs the `energy_j` that only some run scripts leave."""
RECORDED_METRICS = frozenset(CATALOG) - ENERGY_METRICS
"""What a recorded row can tell: the run's own figures but for energy, and nothing that only a trace knows."""
MEMORY_METRICS = frozenset({"peak_memory_gib", "memory_headroom_frac"})
"""Of them, those that only rows with a peak memory tell."""


def find_metric(name: str, where: str, *, from_script: bool = False) -> MetricInfo:
    """What is known of that metric; raises UserError (naming `where`) for a name that nobody measures.

    With `from_script` the name is taken on trust: a run script leaves it in the `metrics` of its `result.json`.
    """
    if name in CATALOG:
        return CATALOG[name]
    if from_script:
        missing = f"the run script left no `metrics.{name}`"
        return MetricInfo(name=name, unit=None, direction=None, source="script", missing=missing)
    traced = _trace_metrics()
    if name in traced:
        unit, better = traced[name]
        direction = None if better is None else _LOW if better == "lower" else _HIGH
        missing = "the traces do not tell it"
        return MetricInfo(name=name, unit=unit, direction=direction, source="trace", missing=missing)
    known = [*CATALOG, *sorted(set(traced) - set(CATALOG))]
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known)}"
    raise UserError(f"{where}: there is no metric {name!r}; {hint} (a run script's own figure needs `source: script`)")


def _trace_metrics() -> dict[str, tuple[str | None, str | None]]:
    """Metrics that the trace toolkit registers -> unit, and whether `lower` or `higher` is better."""
    from cclsearch.plugins import METRICS

    found = {name: METRICS.get(name) for name in METRICS.names()}
    return {name: (getattr(metric, "unit", None), getattr(metric, "better", None)) for name, metric in found.items()}
