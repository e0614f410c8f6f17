"""The metric names of CCL-Bench's dashboard, each answered by the right definition, with what differs from theirs.

What their tools compute was read from the public `tools/` of cornell-sysphotonics/ccl-bench. Units stay ours: fractions
where they print percent, GB = 1e9 bytes where they divide by 2^30.
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
    """Reference of `gpu_step_score`: w N0/N + (1-w) T0/T. The defaults are those of the published tool."""

    num_accelerators: float = 16
    step_time_s: float = 0.44
    weight: float = 0.5


@dataclass(frozen=True)
class Alias:
    """One name of the dashboard."""

    metric: str
    """The metric whose definition answers it."""
    differs: str
    """How theirs differs, and why ours does not do the same."""
    unit: str = ""
    """Where the alias picks a figure beside the metric's value; else the metric's own unit."""
    pick: str = ""
    """Name of that figure in the metric's `inputs`."""


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
        "theirs is the mean length of the host's step markers of sampled ranks; the host runs ahead of the device, "
        "so here it is the period on the device, median over steps, slowest rank",
    ),
    "mfu": Alias(
        "mfu",
        "theirs is in percent, takes the batch of the card as the work of a marker's length on the host, counts all "
        "experts of a mixture and knows two devices at bf16; here a fraction of the period on the device",
    ),
    "communication_fraction": Alias(
        "exposed_comm_frac",
        "theirs adds up concurrent kernels (communication over all kernel time, in percent): hidden and waiting time "
        "count fully; here the share of the step in which communication hides behind nothing",
    ),
    "compute_comm_overlap": Alias(
        "overlap",
        "theirs is in percent, cuts by the host's windows and averages ranks whatever they communicate; here a "
        "fraction within the device's windows, weighted by communication time",
    ),
    "total_communication_time": Alias(
        "comm_time",
        "theirs finds kernels by a few names (symmetric-memory kernels are missed) within the host's windows, and for "
        "Nsight sums over devices and the whole file; here seconds of a step that it covers, mean over ranks",
    ),
    "mean_sm_coverage": Alias(
        "allocation_ratio",
        "theirs is in percent and counts collectives, which hold a few multiprocessors for long, as work (12 where "
        "compute has 24), and for Nsight does not weight by duration; here compute kernels only, weighted by duration",
        unit="fraction",
        pick="sm_coverage",
    ),
    "dominant_kernel_concentration": Alias(
        "concentration",
        "theirs counts collectives among the kernels, takes each template instance for a kernel of its own and prints "
        "percent; here families of compute kernels",
    ),
    "moe_fraction": Alias(
        "moe_frac",
        "theirs matches `dispatch`, `combine` and `topk` in any kernel name (cub's DispatchReduceByKey is one) on any "
        "model; here only names that can mean nothing else, and only where the card says the model has experts",
    ),
    "average_memory_bandwidth": Alias(
        "mem_copy_bw",
        "theirs takes every event with memcpy in its name (host calls and kernels too) and mixes directions; here copy "
        "events of the device in one direction, which inputs name, each of the others apart there",
    ),
    "memory_transfer_overhead": Alias(
        "exposed_mem_frac",
        "theirs is in percent and finds copies by name; here copy events of the device that no compute hides",
    ),
    "load_imbalance_ratio": Alias(
        "compute_imbalance",
        "theirs counts waiting in collectives as activity, which makes the fastest rank look busiest (4.66 where "
        "compute has 1.20); here max over min of compute time alone (the metric's own value is max over mean, less 1)",
        unit="ratio",
        pick="max_over_min",
    ),
    "straggler": Alias(
        "last_arriver",
        "theirs is how far the ends of the ranks' last collectives lie apart on unaligned clocks, and 0.0 where "
        "nothing was read; here the rank that enters collectives last most often, with what that costs in inputs",
    ),
    "ttft": Alias(
        "ttft",
        "theirs is read from a latency file of the benchmark client; here from the engine's markers, to the end of the "
        "device's work, without the time in the queue",
    ),
    "tpot": Alias(
        "tpot",
        "theirs is read from a latency file of the benchmark client; here the period of steps that only decode",
    ),
}
"""Name on the dashboard -> what answers it; `collective_vol_*`, `bandwidth_utilization_*`, `gpu_step_score` apart."""

VOLUME_PREFIX = "collective_vol"
BANDWIDTH_PREFIX = "bandwidth_utilization"
STEP_SCORE = "gpu_step_score"
_VOLUME_DIFFERS = (
    "theirs counts the input of rank 0 over the whole file (the shard, for all-gather), leaves out unknown data types "
    "and takes HBM traffic for messages on TPUs; here message bytes of the full tensor, of one rank, in one step"
)
_BANDWIDTH_DIFFERS = (
    "theirs is no utilization but a bandwidth, in GiB called GB, from one rank's duration, waiting included, and from "
    "the input shard of all-gathers; here bus bandwidth in GB/s (1e9) from the shortest duration over ranks; the share "
    "of the card's links is bw_util"
)


def list_names() -> list[str]:
    """Every name that `measure_name` takes, ours and theirs."""
    families = [f"{prefix}_{name}" for prefix in (VOLUME_PREFIX, BANDWIDTH_PREFIX) for name in [*_COLLECTIVES, "total"]]
    return sorted({*METRICS.names(), *ALIASES, *families, STEP_SCORE} - {f"{BANDWIDTH_PREFIX}_total"})


def check_name(name: str) -> None:
    """Raises UserError that lists the names there are, where `name` is none of them."""
    for prefix in (VOLUME_PREFIX, BANDWIDTH_PREFIX):
        if name.rstrip("_*") == prefix:
            return
        if name.startswith(prefix + "_"):
            _collective_suffix(name, prefix)
            return
    if name not in {*METRICS.names(), *ALIASES, STEP_SCORE}:
        raise UserError(f"there is no metric {name!r}; there are: {', '.join(list_names())}")


def measure_name(trace: TraceView, name: str, reference: StepScoreReference | None = None) -> dict[str, MetricResult]:
    """The result of a metric or of a dashboard's name; a bare prefix gives one result for each collective there is.

    Raises UserError that lists the names there are.
    """
    check_name(name)
    for prefix, make in ((VOLUME_PREFIX, _volume), (BANDWIDTH_PREFIX, _bandwidth)):
        if name.rstrip("_*") == prefix:
            return {f"{prefix}_{kind}": make(trace, f"{prefix}_{kind}", kind) for kind in _kinds_there(trace)}
        if name.startswith(prefix + "_"):
            return {name: make(trace, name, _collective_suffix(name, prefix))}
    if name == STEP_SCORE:
        return {name: _step_score(trace, reference or StepScoreReference())}
    alias = ALIASES.get(name)
    if alias is None:
        return {name: METRICS.get(name)(trace)}
    return {name: _answer(METRICS.get(alias.metric)(trace), name, alias)}


def _answer(result: MetricResult, name: str, alias: Alias) -> MetricResult:
    notes: dict[str, JsonValue] = {"answered_by": alias.metric, "differs": alias.differs}
    if not alias.pick:
        return result.model_copy(update={"name": name, "inputs": {**result.inputs, **notes}})
    figure = result.inputs.get(alias.pick)
    return _with_value(result, name, alias.unit, figure if isinstance(figure, int | float) else None, notes)


def _with_value(
    result: MetricResult, name: str, unit: str, value: float | None, notes: dict[str, JsonValue]
) -> MetricResult:
    """The same result with another figure as its value; not available where there is no such figure."""
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
        raise UserError(f"there is no metric {name!r}; {prefix}_* takes {', '.join(known)}")
    return suffix


def _kinds_there(trace: TraceView) -> list[str]:
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
    """w N0/N + (1-w) T0/T with N accelerators used and T the step time at fixed work; higher is better."""
    step: MetricResult = METRICS.get("trace_step_time")(trace)
    value = None
    if step.value:
        value = reference.weight * reference.num_accelerators / trace.num_devices
        value += (1 - reference.weight) * reference.step_time_s / step.value
    notes: dict[str, JsonValue] = {
        "answered_by": "trace_step_time",
        "differs": "theirs counts files of ranks where gpu_count.txt is missing, and takes the host's markers for the "
        "step; here the world size and the period on the device. Only meaningful at fixed work",
        "num_accelerators": trace.num_devices,
        "reference_num_accelerators": reference.num_accelerators,
        "reference_step_time_s": reference.step_time_s,
        "weight": reference.weight,
    }
    if step.status is Status.OK and trace.device_doubt:
        doubt = {"status": Status.PARTIAL, "reason": Reason.RANKS_MISSING, "detail": trace.device_doubt}
        step = step.model_copy(update=doubt)
    return _with_value(step, STEP_SCORE, "score", value, notes)
