"""Answers of `ccl-search score`: metrics of one trace or of two, tables of operators and kernels, and differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cclsearch.core.errors import UserError
from cclsearch.core.metrics import METRICS
from cclsearch.core.text import count_of, format_table
from cclsearch.core.values import Config
from cclsearch.trace.answers.operators import build_call_tree, build_operator_tree, compare_traces, list_unclassified
from cclsearch.trace.answers.text_report import (
    NO_KERNELS,
    compare_metrics,
    format_call_tree,
    format_changes,
    format_comparison,
    format_diagnosis,
    format_metrics,
    format_operators,
    format_ranks,
    format_unclassified,
)
from cclsearch.trace.ccl_bench import ALIASES, STEP_SCORE, StepScoreReference, check_metric_name, measure_by_name
from cclsearch.trace.events import Reason
from cclsearch.trace.metric import MetricResult
from cclsearch.trace.read import open_trace, read_config
from cclsearch.trace.result import NotAvailable
from cclsearch.trace.score import try_diagnose
from cclsearch.trace.view import NO_TIMES, TraceView

if TYPE_CHECKING:
    from cclsearch.card.model import Card, ModelArch

_SETTINGS = {
    "num_accelerators": "num_accelerators",
    "accelerators_per_node": "accelerators_per_node",
    "global_batch_size": "batch_size",
    "memory_gib": "memory_gb",
}
"""Field of a card -> its name in `--set`, if that differs."""


class KnownFields:
    """The fields that a card has; asking for another raises NotAvailable with the setting that gives it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        values: dict[str, Any] = self.__dict__["_values"]
        if name in values:
            return values[name]
        setting = _SETTINGS.get(name, name)
        raise NotAvailable(Reason.CARD_MISSING_FIELD, f"the card has no {name}: give --set {setting}=...")

    def number(self, name: str) -> int:
        """Return a whole number of the task's work."""
        return int(getattr(self, name))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KnownFields) and other._values == self._values

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._values)))


def load_scoring_card(name: str | None, overlays: Sequence[str] = (), sets: Sequence[str] = ()) -> Card:
    """Return the card of that name or path, whole or with the fields that it has; None starts from an empty card.

    Raises UserError if the file has no `workload` section, or if a setting names an unknown field.
    """
    from cclsearch.card.load import inspect_card  # takes as long as scoring a small trace

    report = inspect_card(name, overlays, sets)
    return report.card or cast("Card", _partial(report.values, report.name))


def _partial(values: Mapping[str, Any], name: str) -> KnownFields:
    from cclsearch.card.model import Hardware, Phase

    hardware = {field: values[field] for field in Hardware.model_fields if field in values}
    renamed = {"total_count": "num_accelerators", "count_per_node": "accelerators_per_node", "memory_gb": "memory_gib"}
    hardware |= {new: values[old] for old, new in renamed.items() if old in values and new not in hardware}
    optional = dict.fromkeys(field for field, info in Hardware.model_fields.items() if not info.is_required())
    phase = Phase(values["phase"]) if "phase" in values else None
    known: dict[str, Any] = {
        "name": name,
        "title": values.get("description", name),
        "task": values.get("task") or (phase or Phase.TRAINING).value,
        "arch": _partial_model(values),
        "hardware": KnownFields({**optional, **hardware}),
        "alternative_precisions": values.get("alternative_precisions", ()),
        "notes": (),
    }
    work = {"global_batch_size": "batch_size", "seq_len": "seq_len"}
    known |= {field: values[key] for field, key in work.items() if key in values}
    known |= {field: values[field] for field in ("precision", "framework") if field in values}
    known |= {"phase": phase} if phase is not None else {}
    return KnownFields(known)


def _partial_model(values: Mapping[str, Any]) -> KnownFields | ModelArch:
    from cclsearch.card.model import ModelArch, MoEArch

    defaults = {name: info.default for name, info in ModelArch.model_fields.items() if not info.is_required()}
    arch = {**defaults, **{name: values[name] for name in ModelArch.model_fields if name in values}}
    experts = {name: values[name] for name in MoEArch.model_fields if name in values}
    is_moe = values.get("moe", True if "num_experts" in values else None)
    arch.pop("moe", None)
    if is_moe is not None or {"num_layers", "hidden_size", "intermediate_size"} <= set(values):
        arch["moe"] = KnownFields(experts) if is_moe else None
    if all(name in arch for name in ModelArch.model_fields) and not is_moe:
        return ModelArch(**arch)
    return KnownFields(arch)


CORE = (
    *("trace_step_time", "compute_frac", "exposed_comm_frac", "exposed_mem_frac", "idle_frac", "comm_time"),
    *("overlap", "comm_wait_frac", "last_arriver", "bus_bw", "comm_volume", "compute_imbalance", "top_kernels"),
    *("peak_memory", "tokens_per_s", "mfu", "trace_quality"),
)
"""Metrics shown by default."""
CORE_WITHOUT_TIMES = ("op_calls", "op_flops", "comm_calls", "comm_volume")
"""Metrics shown by default for execution traces."""


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """One trace, or two to compare, and what to show of them; without metrics, those that suit the traces."""

    traces: Sequence[str]
    cards: Sequence[str] = ()
    """One for all traces, or one for each."""
    overlays: Sequence[str] = ()
    sets: Sequence[str] = ()
    config: str | None = None
    find_inputs: Callable[[Path], tuple[Card, Config] | None] = lambda path: None
    """Finds card and configuration of a path's trial, for traces without `cards`."""
    metrics: Sequence[str] = ()
    all_metrics: bool = False
    reference: StepScoreReference = field(default_factory=StepScoreReference)
    diagnosis: bool = False
    """Only the diagnosis."""
    steps: bool = False
    operators: bool = False
    unclassified: bool = False
    diff: bool = False
    needs_times: bool = False
    workers: int = 1

    def __post_init__(self) -> None:
        if not 1 <= len(self.traces) <= 2:
            raise UserError(f"score takes one trace, or two to compare; {len(self.traces)} were given")
        if len(self.cards) > len(self.traces):
            raise UserError(f"--card takes one card for all traces, or one for each; {len(self.cards)} were given")
        if not 0 <= self.reference.weight <= 1:
            raise UserError(f"--reference-weight must be between 0 and 1, not {self.reference.weight!r}")
        if self.diff and len(self.traces) != 2:
            raise UserError("--diff compares two traces: give the one before and the one after")
        for name in self.metrics:
            check_metric_name(name)

    @property
    def only_tables(self) -> bool:
        """Whether the request asks for tables instead of metrics."""
        return self.diff or self.operators or self.unclassified


@dataclass(frozen=True)
class ScoredTraces:
    """Traces with the metrics that were asked for."""

    request: ScoreRequest
    views: tuple[TraceView, ...]
    results: tuple[dict[str, MetricResult], ...]

    @property
    def all_read(self) -> bool:
        """Whether every trace has ranks that were read."""
        return all(view.ranks for view in self.views)

    def as_data(self) -> object:
        """Return the output of `--json`: for one trace its metrics, for two both and their difference."""
        data = [_as_data(view, found, self.request) for view, found in zip(self.views, self.results, strict=True)]
        if len(data) == 1:
            return data[0]
        return {"a": data[0], "b": data[1], "difference": self._compare()}

    def as_text(self) -> str:
        """Return the tables for a terminal."""
        return "\n\n".join(filter(None, _text_parts(self)))

    def _compare(self) -> dict[str, object]:
        if not self.request.diff:
            return dict(compare_metrics(*self.results))
        return {by: [change.as_data() for change in changes] for by, changes in compare_traces(*self.views).items()}


def score_request(request: ScoreRequest) -> ScoredTraces:
    """Return the metrics of the traces; raises UserError if a trace or card cannot be read, or has no times."""
    views = _open_views(request)
    names = _wanted_names(request, is_timed=all(view.is_timed for view in views))
    results = tuple(_measure(view, names, request) for view in views)
    if (request.needs_times or request.diff or request.unclassified) and not all(view.is_timed for view in views):
        raise UserError(f"--perfetto, --diff, --picture and --unclassified need times: {NO_TIMES}")
    return ScoredTraces(request, views, results)


def list_metrics() -> str:
    """Return a table of all metrics, with CCL-Bench's names."""
    rows = [(name, METRICS.get(name).unit, METRICS.get(name).summary) for name in METRICS.names()]
    rows += [
        (name, "", f"CCL-Bench's name, computed from {a.metric}") for name, a in ALIASES.items() if name != a.metric
    ]
    rows += [("collective_vol_*", "GB/step", "CCL-Bench's name, computed from comm_volume")]
    rows += [("bandwidth_utilization_*", "GB/s", "CCL-Bench's name, computed from bus_bw")]
    rows += [(STEP_SCORE, "score", "CCL-Bench's combined score: w N0/N + (1-w) T0/T")]
    return format_table(("metric", "unit", "meaning"), rows)


def _wanted_names(request: ScoreRequest, *, is_timed: bool) -> list[str]:
    if request.metrics:
        return list(dict.fromkeys(request.metrics))
    if request.only_tables:
        return []
    if request.all_metrics:
        return METRICS.names()
    return list(CORE if is_timed else CORE_WITHOUT_TIMES)


def _open_views(request: ScoreRequest) -> tuple[TraceView, ...]:
    named: list[str | None] = list(request.cards) or ([None] if request.sets or request.overlays else [])
    cards = [load_scoring_card(name, request.overlays, request.sets) for name in named]
    config = read_config(Path(request.config)) if request.config else None
    views: list[TraceView] = []
    for i, path in enumerate(request.traces):
        baseline = views[0] if views else None
        card, knobs = cards[min(i, len(cards) - 1)] if cards else None, config
        if card is None and (found := request.find_inputs(Path(path))) is not None:
            card, knobs = found[0], config or found[1]
        views.append(open_trace(Path(path), card=card, config=knobs, baseline=baseline, workers=request.workers))
    return tuple(views)


def _measure(view: TraceView, names: Sequence[str], request: ScoreRequest) -> dict[str, MetricResult]:
    results: dict[str, MetricResult] = {}
    for name in [] if request.diagnosis else names:
        by_name = measure_by_name(view, name, request.reference) if request.metrics else {name: METRICS.get(name)(view)}
        results.update(by_name)
    return results


def _as_data(view: TraceView, found: dict[str, MetricResult], request: ScoreRequest) -> object:
    if request.diagnosis:
        diagnosis = try_diagnose(view)
        return diagnosis.model_dump(mode="json") if diagnosis else None
    data: dict[str, object] = {name: result.model_dump(mode="json") for name, result in found.items()}
    if request.operators:
        data["operators"] = (build_operator_tree(view) if view.is_timed else build_call_tree(view)).as_data()
    if request.unclassified:
        data["unclassified"] = [asdict(kernel) for kernel in list_unclassified(view)]
    return data


def _text_parts(scored: ScoredTraces) -> list[str]:
    request, views, results = scored.request, scored.views, scored.results
    parts = []
    for path, view in zip(request.traces, views, strict=True):
        trace = view.trace_set
        ranks = f"{len(view.ranks)} of {view.world_size} ranks"
        if not view.world_size:
            ranks = f"{count_of(len(view.ranks), 'rank')} (the trace does not say of how many)"
        heading = f"{path}: {ranks}, {trace.status}"
        if trace.message:
            heading += f" ({trace.reason}: {trace.message})" if trace.reason else f" ({trace.message})"
        parts.append(heading if view.is_timed else f"{heading}\nWithout times: {NO_TIMES}")
        whole = not (request.metrics or request.only_tables) or request.diagnosis
        diagnosis = try_diagnose(view) if whole else None
        if diagnosis:
            parts.append(format_diagnosis(diagnosis))
        if (whole or request.steps) and view.ranks and view.is_timed:
            parts.append(format_ranks(view, by_step=request.steps))
        if request.operators and view.ranks:
            by_calls = "" if view.is_timed else format_call_tree(build_call_tree(view), view.covered)
            parts.append(by_calls or format_operators(build_operator_tree(view)))
        if request.unclassified and view.ranks:
            is_cpu = all(one.table.accelerator == "cpu" for one in view.ranks.values())
            parts.append(NO_KERNELS if is_cpu else format_unclassified(list_unclassified(view), view.covered))
    if request.diff:
        parts.append(format_changes(compare_traces(*views), [view.covered for view in views]))
    if len(results) == 2:
        return [*parts, format_comparison(*results) if results[0] else ""]
    shown = results[0] if views[0].ranks or request.metrics else {}
    return [*parts, format_metrics(shown) if shown else ""]
