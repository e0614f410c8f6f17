"""The metric names of CCL-Bench's dashboard: the metric that each name maps to, and how CCL-Bench's definition differs.

CCL-Bench's definitions are those of the public `tools/` of cornell-sysphotonics/ccl-bench. Units stay those of this
project: fractions instead of percent, and GB = 1e9 bytes instead of 2^30.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from cclsearch.core.errors import UserError
from cclsearch.plugins import METRICS
from cclsearch.trace.events import CollectiveKind, Reason
from cclsearch.trace.metric import MetricResult, Status
from cclsearch.trace.view import TraceView


@dataclass(frozen=True)
class StepScoreReference:
    """Reference values of `gpu_step_score`: w N0/N + (1-w) T0/T. The defaults are those of the published tool."""

    num_accelerators: float = 16
    step_time_s: float = 0.44
    weight: float = 0.5


@dataclass(frozen=True)
class Alias:
    """One metric name of the dashboard."""

    metric: str
    """The metric that the name maps to."""
    differs: str
    """How CCL-Bench's definition differs, and why it is not used here."""
    unit: str = ""
    """Unit of the picked figure; unused without `pick`."""
    pick: str = ""
    """Name in the metric's `inputs` of the figure to use instead of the value; empty for the value itself."""


_COLLECTIVES: Mapping[str, tuple[CollectiveKind, ...]] = {
    "allreduce": (CollectiveKind.ALL_REDUCE,),
    "allgather": (CollectiveKind.ALL_GATHER,),
    "reducescatter": (CollectiveKind.REDUCE_SCATTER,),
    "alltoall": (CollectiveKind.ALL_TO_ALL,),
    "broadcast": (CollectiveKind.BROADCAST,),
    "reduce": (CollectiveKind.REDUCE,),
    "gather": (CollectiveKind.GATHER,),
    "scatter": (CollectiveKind.SCATTER,),
    "peertopeer": (CollectiveKind.SEND_RECV, CollectiveKind.SEND, CollectiveKind.RECV),
    "sendrecv": (CollectiveKind.SEND_RECV, CollectiveKind.SEND, CollectiveKind.RECV),
}

ALIASES: Mapping[str, Alias] = {
    "avg_step_time": Alias(
        "trace_step_time",
        "CCL-Bench: mean length of the host's step markers of sampled ranks, but the host runs ahead of the device; "
        "here: period on the device, median over steps, slowest rank",
    ),
    "mfu": Alias(
        "mfu",
        "CCL-Bench: percent, with the card's batch over the length of a host marker, all experts of a mixture, and the "
        "bf16 peaks of two devices only; here: a fraction, from the period on the device",
    ),
    "communication_fraction": Alias(
        "exposed_comm_frac",
        "CCL-Bench: communication over all kernel time in percent, a sum over concurrent kernels, so overlapped and "
        "waiting time count fully; here: share of the step with communication that does not overlap",
    ),
    "compute_comm_overlap": Alias(
        "overlap",
        "CCL-Bench: percent within the host's windows, each rank with the same weight; here: a fraction within the "
        "device's windows, weighted by communication time",
    ),
    "total_communication_time": Alias(
        "comm_time",
        "CCL-Bench: kernels with a few names (not symmetric-memory ones) within the host's windows; for Nsight, summed "
        "over devices and the whole file; here: seconds covered per step, mean over ranks",
    ),
    "mean_sm_coverage": Alias(
        "allocation_ratio",
        "CCL-Bench: percent, with collectives, which occupy few multiprocessors for long (12 % instead of 24 %), "
        "and for Nsight not weighted by duration; here: compute kernels only, weighted by duration",
        unit="fraction",
        pick="sm_coverage",
    ),
    "dominant_kernel_concentration": Alias(
        "concentration",
        "CCL-Bench: percent, with collectives, and each template instance as a separate kernel; here: a fraction, by "
        "families of compute kernels",
    ),
    "moe_fraction": Alias(
        "moe_frac",
        "CCL-Bench: `dispatch`, `combine` or `topk` in any kernel name (also cub's DispatchReduceByKey) of any model; "
        "here: only unambiguous names, and only if the card says that the model has experts",
    ),
    "average_memory_bandwidth": Alias(
        "mem_copy_bw",
        "CCL-Bench: every event with memcpy in its name (also host calls and kernels), directions mixed; here: the "
        "device's copy events in one direction, with every direction in inputs",
    ),
    "memory_transfer_overhead": Alias(
        "exposed_mem_frac",
        "CCL-Bench: percent, copies found by name; here: the device's copy events that do not overlap with compute",
    ),
    "load_imbalance_ratio": Alias(
        "compute_imbalance",
        "CCL-Bench: waiting in collectives counts as activity, so the fastest rank looks busiest (4.66, not 1.20); "
        "here: max over min of compute time alone (compute_imbalance itself is max over mean, minus 1)",
        unit="ratio",
        pick="max_over_min",
    ),
    "straggler": Alias(
        "last_arriver",
        "CCL-Bench: spread of the ends of the ranks' last collectives on unaligned clocks, 0.0 if nothing was read; "
        "here: the rank that most often enters collectives last, with its cost in inputs",
    ),
    "ttft": Alias(
        "ttft",
        "CCL-Bench: from a latency file of the benchmark client; here: from the request log, else from the engine's "
        "markers to the end of the device's work, without queueing",
    ),
    "tpot": Alias(
        "tpot",
        "CCL-Bench: from a latency file of the benchmark client; here: from the request log, else the period of "
        "decode-only steps",
    ),
}
"""Name on the dashboard -> alias, except `collective_vol_*`, `bandwidth_utilization_*` and `gpu_step_score`."""

VOLUME_PREFIX = "collective_vol"
BANDWIDTH_PREFIX = "bandwidth_utilization"
STEP_SCORE = "gpu_step_score"
_VOLUME_DIFFERS = (
    "CCL-Bench: input of rank 0 over the whole file (for all-gather, the shard), without unknown data types, and HBM "
    "traffic instead of messages on TPUs; here: message bytes of the full tensor, per rank and step"
)
_BANDWIDTH_DIFFERS = (
    "CCL-Bench: a bandwidth, not a utilization, in GiB/s (labeled GB/s), from the duration of one rank, which includes "
    "waiting, and from the input shard of all-gathers; here: bus bandwidth in GB/s (1e9) from the shortest duration "
    "over ranks; the share of the card's link bandwidth is bw_util"
)


def list_metric_names() -> list[str]:
    """Return every name that `measure_by_name` accepts: metrics and dashboard names."""
    families = [f"{prefix}_{name}" for prefix in (VOLUME_PREFIX, BANDWIDTH_PREFIX) for name in [*_COLLECTIVES, "total"]]
    return sorted({*METRICS.names(), *ALIASES, *families, STEP_SCORE} - {f"{BANDWIDTH_PREFIX}_total"})


def check_metric_name(name: str) -> None:
    """Raise UserError with the list of known names if `name` is not one of them."""
    for prefix in (VOLUME_PREFIX, BANDWIDTH_PREFIX):
        if name.rstrip("_*") == prefix:
            return
        if name.startswith(prefix + "_"):
            _collective_suffix(name, prefix)
            return
    if name not in {*METRICS.names(), *ALIASES, STEP_SCORE}:
        raise UserError(f"there is no metric {name!r}; metrics: {', '.join(list_metric_names())}")


def measure_by_name(
    trace: TraceView, name: str, reference: StepScoreReference | None = None
) -> dict[str, MetricResult]:
    """Return the result of a metric or dashboard name; a bare prefix gives one result per recorded collective.

    Raises UserError with the list of known names if `name` is unknown.
    """
    check_metric_name(name)
    for prefix, make in ((VOLUME_PREFIX, _volume), (BANDWIDTH_PREFIX, _bandwidth)):
        if name.rstrip("_*") == prefix:
            return {f"{prefix}_{kind}": make(trace, f"{prefix}_{kind}", kind) for kind in _recorded_collectives(trace)}
        if name.startswith(prefix + "_"):
            return {name: make(trace, name, _collective_suffix(name, prefix))}
    if name == STEP_SCORE:
        return {name: _step_score(trace, reference or StepScoreReference())}
    alias = ALIASES.get(name)
    if alias is None:
        return {name: METRICS.get(name)(trace)}
    return {name: _rename_result(METRICS.get(alias.metric)(trace), name, alias)}


def _rename_result(result: MetricResult, name: str, alias: Alias) -> MetricResult:
    notes: dict[str, JsonValue] = {"answered_by": alias.metric, "differs": alias.differs}
    if not alias.pick:
        return result.model_copy(update={"name": name, "inputs": {**result.inputs, **notes}})
    value = result.inputs.get(alias.pick)
    return _with_value(result, name, alias.unit, value if isinstance(value, int | float) else None, notes)


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
        raise UserError(f"there is no metric {name!r}; {prefix}_* accepts {', '.join(known)}")
    return suffix


def _recorded_collectives(trace: TraceView) -> list[str]:
    kinds = {call.kind for view in trace.ranks.values() for call in view.table.collectives}
    found = [name for name, members in _COLLECTIVES.items() if kinds & set(members) and name != "sendrecv"]
    return found or ["allreduce"]


def _sum_of_kinds(figures: JsonValue, suffix: str, combine: Callable[[list[float]], float]) -> float | None:
    if not isinstance(figures, dict):
        return None
    kinds = None if suffix == "total" else {str(kind) for kind in _COLLECTIVES[suffix]}
    found = [float(v) for kind, v in figures.items() if (kinds is None or kind in kinds) and isinstance(v, int | float)]
    return combine(found) if found else None


def _volume(trace: TraceView, name: str, suffix: str) -> MetricResult:
    result: MetricResult = METRICS.get("comm_volume")(trace)
    total = _sum_of_kinds(result.inputs.get("message_bytes_by_collective"), suffix, sum)
    wire = _sum_of_kinds(result.inputs.get("wire_bytes_by_collective"), suffix, sum)
    notes: dict[str, JsonValue] = {
        "answered_by": "comm_volume",
        "differs": _VOLUME_DIFFERS,
        "wire_gb": None if wire is None else wire / 1e9,
    }
    return _with_value(result, name, "GB/step", None if total is None else total / 1e9, notes)


def _bandwidth(trace: TraceView, name: str, suffix: str) -> MetricResult:
    result: MetricResult = METRICS.get("bus_bw")(trace)
    value = _sum_of_kinds(result.inputs.get("by_collective_gbps"), suffix, max)
    notes: dict[str, JsonValue] = {"answered_by": "bus_bw", "differs": _BANDWIDTH_DIFFERS}
    return _with_value(result, name, "GB/s", value, notes)


def _step_score(trace: TraceView, reference: StepScoreReference) -> MetricResult:
    """Return w N0/N + (1-w) T0/T for N accelerators and step time T at fixed work; higher is better."""
    step: MetricResult = METRICS.get("trace_step_time")(trace)
    value = None
    if step.value:
        value = reference.weight * reference.num_accelerators / trace.num_devices
        value += (1 - reference.weight) * reference.step_time_s / step.value
    notes: dict[str, JsonValue] = {
        "answered_by": "trace_step_time",
        "differs": "CCL-Bench: counts rank files if gpu_count.txt is missing, and uses the step time of host markers; "
        "here: the world size and the period on the device. Meaningful only at fixed work",
        "num_accelerators": trace.num_devices,
        "reference_num_accelerators": reference.num_accelerators,
        "reference_step_time_s": reference.step_time_s,
        "weight": reference.weight,
    }
    if step.status is Status.OK and trace.device_count_caveat:
        partial = {"status": Status.PARTIAL, "reason": Reason.RANKS_MISSING, "detail": trace.device_count_caveat}
        step = step.model_copy(update=partial)
    return _with_value(step, STEP_SCORE, "score", value, notes)
