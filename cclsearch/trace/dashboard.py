"""The metrics of CCL-Bench's public dashboard, as a search's ledger can answer them without reading a trace again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cclsearch.core.metrics import METRICS
from cclsearch.trace.ccl_bench import ALIASES, BANDWIDTH_PREFIX, FAMILIES, STEP_SCORE, VOLUME_PREFIX, StepScoreReference

_STEP_TIME = "avg_step_time"
DASHBOARD = (
    _STEP_TIME, "ttft", "tpot", "mfu", STEP_SCORE,
    "mean_sm_coverage", "dominant_kernel_concentration", "moe_fraction", "load_imbalance_ratio", "straggler",
    "average_memory_bandwidth", "memory_transfer_overhead",
    "communication_fraction", "total_communication_time", "compute_comm_overlap",
    *(f"{VOLUME_PREFIX}_{kind}" for kind in ("allreduce", "allgather", "reducescatter", "alltoall", "total")),
    *(f"{BANDWIDTH_PREFIX}_{kind}" for kind in ("allreduce", "allgather", "reducescatter", "alltoall", "peertopeer")),
    "scale_up_bw_utility",
)  # fmt: skip
"""Names of the dashboard, by subject: the model's execution, the chip, its memory, communication."""
_FROM_RESULT = {_STEP_TIME: "step_time_s", "ttft": "ttft_p50_s", "tpot": "tpot_p50_s"}
"""Name -> metric of the trial's own result that replaces it if the traces have no value."""
_PER_WORK = frozenset({_STEP_TIME, "total_communication_time"})
"""Seconds for an amount of work: more accelerators shorten them."""
_FAMILIES = {VOLUME_PREFIX: ("GB/step", "lower"), BANDWIDTH_PREFIX: ("GB/s", "higher"), STEP_SCORE: ("score", "higher")}
"""Prefix of a family of names -> its unit and better direction."""


@dataclass(frozen=True)
class DashboardName:
    """Properties of a dashboard name before any trace is read."""

    unit: str
    better: str
    """`higher`, `lower`, or empty if neither direction is."""
    metric: str
    """The metric of traces that answers it; empty if none can."""
    is_per_work: bool
    """Whether it is a time that more accelerators shorten."""
    differs: str
    """Difference of CCL-Bench's definition."""


def describe_name(name: str) -> DashboardName:
    """Return the properties of one of the names in `DASHBOARD`."""
    for prefix, (unit, better) in _FAMILIES.items():
        if name.startswith(prefix):
            family = FAMILIES[prefix]
            return DashboardName(unit, better, family.metric, False, family.differs)
    alias = ALIASES[name]
    if not alias.metric:
        return DashboardName("fraction", "", "", False, alias.differs)
    found = METRICS.get(alias.metric)
    unit = (alias.unit if alias.pick else str(getattr(found, "unit", ""))) or ""
    better = str(getattr(found, "better", None) or "")
    return DashboardName(unit, better, alias.metric, name in _PER_WORK, alias.differs)


def find_recorded(name: str, metrics: Mapping[str, float], num_accelerators: int) -> tuple[float | None, str]:
    """Return the value of a name from a trial's recorded metrics; else None and why, in one sentence."""
    if name == STEP_SCORE:
        step_s, why = find_recorded(_STEP_TIME, metrics, num_accelerators)
        return StepScoreReference().score(step_s, num_accelerators), why
    known = describe_name(name)
    is_family = name.startswith((VOLUME_PREFIX, BANDWIDTH_PREFIX))
    if not known.metric:
        return None, ALIASES[name].missing
    if not is_family and not ALIASES[name].pick and known.metric in metrics:
        return metrics[known.metric], ""
    if _FROM_RESULT.get(name) in metrics:
        return metrics[_FROM_RESULT[name]], ""
    if known.metric in metrics:
        return None, f"a part of {known.metric!r} that the ledger does not have: read the trial's traces"
    return None, f"the trial's traces did not answer {known.metric!r}, or it has none"
