"""The metric names of CCL-Bench's dashboard, each with its metric here and the difference between the definitions.

CCL-Bench's definitions are in the public `tools/` of cornell-sysphotonics/ccl-bench. Units stay this project's:
fractions instead of percent, and GB = 1e9 bytes instead of 2^30.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from cclsearch.core.errors import UserError
from cclsearch.core.metrics import METRICS
from cclsearch.core.text import guess_name
from cclsearch.core.yaml_file import read_yaml
from cclsearch.trace.events import POINT_TO_POINT, CollectiveKind, Reason
from cclsearch.trace.metric import MetricResult, Status
from cclsearch.trace.view import TraceView


@dataclass(frozen=True)
class StepScoreReference:
    """Reference values of `gpu_step_score`: w N0/N + (1-w) T0/T. The defaults are the published tool's."""

    num_accelerators: float = 16
    step_time_s: float = 0.44
    weight: float = 0.5

    def score(self, step_time_s: float | None, num_accelerators: int) -> float | None:
        """Return w N0/N + (1-w) T0/T for N accelerators and step time T; None if one of them is 0 or not known."""
        if not step_time_s or not num_accelerators:
            return None
        share = self.weight * self.num_accelerators / num_accelerators
        return share + (1 - self.weight) * self.step_time_s / step_time_s


@dataclass(frozen=True)
class Alias:
    """One metric name of the dashboard, from `ccl_bench.yaml`."""

    metric: str
    """The metric that the name maps to; empty if no metric of a trace can answer."""
    differs: str
    """Difference of CCL-Bench's definition, and why it is not used here."""
    unit: str = ""
    """Unit of the picked figure; unused without `pick`."""
    pick: str = ""
    """Path in the metric's `inputs` of the figure to use instead of the value; empty for the value itself."""
    missing: str = ""
    """Reason why there is no value, for a name without a metric."""

    @property
    def notes(self) -> dict[str, JsonValue]:
        """Notes of a result on the two definitions."""
        return {**({"answered_by": self.metric} if self.metric else {}), "differs": self.differs}

    def find(self, inputs: Mapping[str, JsonValue]) -> float | None:
        """Return the picked figure; None if the metric did not measure it."""
        found: JsonValue = dict(inputs)
        for part in self.pick.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return float(found) if isinstance(found, int | float) else None


_COLLECTIVES: Mapping[str, Iterable[CollectiveKind]] = {
    **{
        str(kind).replace("_", ""): (kind,)
        for kind in CollectiveKind
        if kind not in (*POINT_TO_POINT, CollectiveKind.BARRIER, CollectiveKind.UNKNOWN)
    },
    "peertopeer": POINT_TO_POINT,
    "sendrecv": POINT_TO_POINT,
}

VOLUME_PREFIX, BANDWIDTH_PREFIX, STEP_SCORE = "collective_vol", "bandwidth_utilization", "gpu_step_score"
_BANDWIDTH_FAMILY = "bus_bandwidth"
"""The entry of the names that begin with BANDWIDTH_PREFIX: that name alone is another metric, of another group."""
_NAMES = {name: Alias(**fields) for name, fields in read_yaml(Path(__file__).with_name("ccl_bench.yaml")).items()}
ALIASES: Mapping[str, Alias] = {
    name: alias for name, alias in _NAMES.items() if name not in (VOLUME_PREFIX, _BANDWIDTH_FAMILY, STEP_SCORE)
}
"""Name on the dashboard -> alias, except `collective_vol_*`, `bandwidth_utilization_*` and `gpu_step_score`."""
FAMILIES: Mapping[str, Alias] = {
    VOLUME_PREFIX: _NAMES[VOLUME_PREFIX],
    BANDWIDTH_PREFIX: _NAMES[_BANDWIDTH_FAMILY],
    STEP_SCORE: _NAMES[STEP_SCORE],
}
"""Prefix of names that `ALIASES` leaves out -> alias."""


def list_metric_names() -> list[str]:
    """Return every name that `measure_by_name` accepts: metrics and dashboard names."""
    families = [f"{prefix}_{name}" for prefix in (VOLUME_PREFIX, BANDWIDTH_PREFIX) for name in [*_COLLECTIVES, "total"]]
    return sorted({*METRICS.names(), *ALIASES, *families, STEP_SCORE} - {f"{BANDWIDTH_PREFIX}_total"})


def check_metric_name(name: str) -> None:
    """Raise UserError with the list of known names if `name` is not one of them."""
    if name in ALIASES:
        return
    for prefix in (VOLUME_PREFIX, BANDWIDTH_PREFIX):
        if name.rstrip("_*") == prefix:
            return
        if name.startswith(prefix + "_"):
            _collective_suffix(name, prefix)
            return
    if name not in {*METRICS.names(), *ALIASES, STEP_SCORE}:
        known = list_metric_names()
        raise UserError(f"there is no metric {name!r}{guess_name(name, known)}; metrics: {', '.join(known)}")


def measure_by_name(
    trace: TraceView, name: str, reference: StepScoreReference | None = None
) -> dict[str, MetricResult]:
    """Return the result of a metric or dashboard name; a bare prefix gives one result per recorded collective.

    Raises UserError with the list of known names if `name` is unknown.
    """
    check_metric_name(name)
    if name in ALIASES:
        return {name: _answer(trace, name, ALIASES[name])}
    for prefix, make in ((VOLUME_PREFIX, _volume), (BANDWIDTH_PREFIX, _bandwidth)):
        if name.rstrip("_*") == prefix:
            calls = {call.kind for view in trace.ranks.values() for call in view.table.collectives}
            kinds = [kind for kind, members in _COLLECTIVES.items() if calls & set(members) and kind != "sendrecv"]
            return {f"{prefix}_{kind}": make(trace, f"{prefix}_{kind}", kind) for kind in kinds or ["allreduce"]}
        if name.startswith(prefix + "_"):
            return {name: make(trace, name, _collective_suffix(name, prefix))}
    if name == STEP_SCORE:
        return {name: _step_score(trace, reference or StepScoreReference())}
    return {name: METRICS.get(name)(trace)}


def _answer(trace: TraceView, name: str, alias: Alias) -> MetricResult:
    if not alias.metric:
        return MetricResult(
            name=name,
            value=None,
            unit=alias.unit,
            world_size=trace.world_size,
            status=Status.NOT_AVAILABLE,
            reason=Reason.FORMAT_UNSUPPORTED,
            detail=alias.missing,
            inputs=alias.notes,
        )
    result: MetricResult = METRICS.get(alias.metric)(trace)
    if not alias.pick:
        return result.model_copy(update={"name": name, "inputs": {**result.inputs, **alias.notes}})
    return _with_value(result, name, alias.unit, alias.find(result.inputs), alias.notes)


def _with_value(
    result: MetricResult, name: str, unit: str, value: float | None, notes: dict[str, JsonValue]
) -> MetricResult:
    """Return the result with another value; not available if the value is None."""
    missing = value is None
    update = {
        "name": name,
        "unit": unit,
        "value": value,
        "per_rank": {},
        "per_step": (),
        "inputs": notes,
        "status": Status.NOT_AVAILABLE if missing else result.status,
        "reason": (result.reason or Reason.NO_COMM_EVENTS) if missing else result.reason,
    }
    return MetricResult.model_validate({**result.model_dump(), **update})


def _collective_suffix(name: str, prefix: str) -> str:
    suffix = name.removeprefix(prefix + "_").removesuffix("_gb").removesuffix("_group_6").replace("_", "")
    known = [*_COLLECTIVES, *(["total"] if prefix == VOLUME_PREFIX else [])]
    if suffix not in known:
        guess = guess_name(name, (f"{prefix}_{each}" for each in known))
        raise UserError(f"there is no metric {name!r}{guess}; {prefix}_* accepts {', '.join(known)}")
    return suffix


def _sum_of_kinds(figures: JsonValue, suffix: str, combine: Callable[[list[float]], float]) -> float | None:
    if not isinstance(figures, dict):
        return None
    kinds = None if suffix == "total" else {str(kind) for kind in _COLLECTIVES[suffix]}
    found = [float(v) for kind, v in figures.items() if (kinds is None or kind in kinds) and isinstance(v, int | float)]
    return combine(found) if found else None


def _volume(trace: TraceView, name: str, suffix: str) -> MetricResult:
    result = METRICS.get("comm_volume")(trace)
    total = _sum_of_kinds(result.inputs.get("message_bytes_by_collective"), suffix, sum)
    wire = _sum_of_kinds(result.inputs.get("wire_bytes_by_collective"), suffix, sum)
    notes = {**_NAMES[VOLUME_PREFIX].notes, "wire_gb": None if wire is None else wire / 1e9}
    return _with_value(result, name, "GB/step", None if total is None else total / 1e9, notes)


def _bandwidth(trace: TraceView, name: str, suffix: str) -> MetricResult:
    result = METRICS.get("bus_bw")(trace)
    value = _sum_of_kinds(result.inputs.get("by_collective_gbps"), suffix, max)
    return _with_value(result, name, "GB/s", value, _NAMES[_BANDWIDTH_FAMILY].notes)


def _step_score(trace: TraceView, reference: StepScoreReference) -> MetricResult:
    step = METRICS.get("trace_step_time")(trace)
    notes = {
        **_NAMES[STEP_SCORE].notes,
        "num_accelerators": trace.num_devices,
        "reference_num_accelerators": reference.num_accelerators,
        "reference_step_time_s": reference.step_time_s,
        "weight": reference.weight,
    }
    if step.status is Status.OK and trace.device_count_caveat:
        partial = {"status": Status.PARTIAL, "reason": Reason.RANKS_MISSING, "detail": trace.device_count_caveat}
        step = step.model_copy(update=partial)
    return _with_value(step, STEP_SCORE, "score", reference.score(step.value, trace.num_devices), notes)


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
