"""The metrics that a trial's evaluation derives: name, unit, better direction and source.

An objective may also use metrics of the trace toolkit, which are in the toolkit's registry.
"""

from __future__ import annotations

import difflib

from cclsearch.core.errors import UserError
from cclsearch.core.metrics import Direction, MetricInfo


def _result(name: str, unit: str, direction: Direction, missing: str, **words: str) -> MetricInfo:
    positive = name != "memory_headroom_frac"
    return MetricInfo(
        name=name, unit=unit, direction=direction, source="result", missing=missing, is_positive=positive, **words
    )


_LOW, _HIGH = Direction.MINIMIZE, Direction.MAXIMIZE
_NO_TIMES = "the run script reported no step times"
_NO_MEMORY = "the run script reported no peak memory of the accelerator"
_NO_ENERGY = "no power was recorded, so the run script reported no `energy_j`"

CATALOG: dict[str, MetricInfo] = {
    info.name: info
    for info in (
        _result("step_time_s", "s", _LOW, _NO_TIMES, label="step time", short="step", axis="seconds per step"),
        _result("tokens_per_s", "tokens/s", _HIGH, _NO_TIMES, label="tokens/s"),
        _result(
            "tokens_per_s_per_accelerator", "tokens/s", _HIGH, _NO_TIMES,
            label="tokens/s per accelerator", heading="tokens/s per accel.",
        ),
        _result("samples_per_s", "sequences/s", _HIGH, _NO_TIMES),
        _result("mfu", "fraction", _HIGH, "the accelerator's peak or the model's FLOPs are unknown", label="MFU"),
        _result("num_accelerators", "accelerators", _LOW, "the run script did not declare its world size"),
        _result("accelerator_seconds_per_mtoken", "accelerator-s/Mtoken", _LOW, _NO_TIMES),
        _result(
            "peak_memory_gib", "GiB", _LOW, "the run script reported no peak memory",
            label="peak memory", heading="memory (GiB)",
        ),
        _result("memory_headroom_frac", "fraction", _HIGH, _NO_MEMORY),
        _result("energy_j_per_step", "J", _LOW, _NO_ENERGY),
        _result("energy_j_per_mtoken", "J/Mtoken", _LOW, _NO_ENERGY),
        _result("power_w", "W", _LOW, _NO_ENERGY),
    )
}  # fmt: skip
"""Name -> properties. `Mtoken` is a million tokens; a sequence has `seq_len` tokens."""

ENERGY_METRICS = frozenset(name for name, info in CATALOG.items() if info.missing == _NO_ENERGY)
"""Metrics that need `energy_j`, which only some run scripts report."""
RECORDED_METRICS = frozenset(CATALOG) - ENERGY_METRICS
"""Metrics that a recorded row can have: all of the run's own except energy, and none that needs a trace."""
MEMORY_METRICS = frozenset({"peak_memory_gib", "memory_headroom_frac"})
"""Those of them that need a row with peak memory."""


def find_metric(name: str, where: str, *, from_script: bool = False) -> MetricInfo:
    """Properties of that metric; raises UserError (naming `where`) for an unknown name.

    With `from_script` any name is accepted: the run script reports it in `metrics` of its `result.json`.
    """
    if name in CATALOG:
        return CATALOG[name]
    if from_script:
        missing = f"the run script reported no `metrics.{name}`"
        return MetricInfo(name=name, unit=None, direction=None, source="script", missing=missing)
    traced = _trace_metrics()
    if name in traced:
        unit, better = traced[name]
        direction = None if better is None else _LOW if better == "lower" else _HIGH
        missing = "the traces do not contain it"
        return MetricInfo(name=name, unit=unit, direction=direction, source="trace", missing=missing)
    known = [*CATALOG, *sorted(set(traced) - set(CATALOG))]
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise UserError(
        f"{where}: there is no metric {name!r}; {hint} (a metric of your run script needs `source: script`)"
    )


def _trace_metrics() -> dict[str, tuple[str | None, str | None]]:
    """Metrics of the trace toolkit -> unit, and whether `lower` or `higher` is better."""
    from cclsearch.plugins import METRICS

    found = {name: METRICS.get(name) for name in METRICS.names()}
    return {name: (getattr(metric, "unit", None), getattr(metric, "better", None)) for name, metric in found.items()}
