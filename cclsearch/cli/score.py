"""`ccl-search score`: the metrics and the diagnosis of profiler traces."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path

import orjson

from cclsearch.core.errors import UserError, require_writable
from cclsearch.core.text import plain
from cclsearch.plugins import METRICS
from cclsearch.trace.call_tree import build_call_tree
from cclsearch.trace.ccl_bench import ALIASES, STEP_SCORE, StepScoreReference, check_metric_name, measure_by_name
from cclsearch.trace.difference import compare_traces, list_unclassified
from cclsearch.trace.export.perfetto import export_perfetto
from cclsearch.trace.kernel_classes import VARIABLE, check_classes
from cclsearch.trace.metric import MetricResult
from cclsearch.trace.open import open_trace, read_config
from cclsearch.trace.operators import build_operator_tree
from cclsearch.trace.partial_card import load_scoring_card
from cclsearch.trace.score import try_diagnose
from cclsearch.trace.text_report import (
    NO_KERNELS,
    compare_metrics,
    format_call_tree,
    format_changes,
    format_comparison,
    format_diagnosis,
    format_metrics,
    format_operators,
    format_ranks,
    format_table,
    format_unclassified,
)
from cclsearch.trace.view import NO_TIMES, TraceView

CORE = (
    *("trace_step_time", "compute_frac", "exposed_comm_frac", "exposed_mem_frac", "idle_frac", "comm_time"),
    *("overlap", "comm_wait_frac", "last_arriver", "bus_bw", "comm_volume", "compute_imbalance", "top_kernels"),
    *("peak_memory", "tokens_per_s", "mfu", "trace_quality"),
)
"""Metrics shown by default."""
CORE_WITHOUT_TIMES = ("op_calls", "op_flops", "comm_calls", "comm_volume")
"""Metrics shown by default for execution traces."""


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 if every trace was read, 1 if one could not be read."""
    if args.list:
        print(_list_metrics())
        return 0
    if not 1 <= len(args.trace) <= 2:
        raise UserError(f"score takes one trace, or two to compare; {len(args.trace)} were given")
    if len(args.card) > len(args.trace):
        raise UserError(f"--card takes one card for all traces, or one for each; {len(args.card)} were given")
    if not 0 <= args.reference_weight <= 1:
        raise UserError(f"--reference-weight must be between 0 and 1, not {args.reference_weight!r}")
    if args.diff and len(args.trace) != 2:
        raise UserError("--diff compares two traces: give the one before and the one after")
    if args.kernel_classes:
        check_classes(Path(args.kernel_classes))
        os.environ[VARIABLE] = str(Path(args.kernel_classes).absolute())
    if args.perfetto:
        require_writable(Path(args.perfetto), "--perfetto")
    for name in args.metric:
        check_metric_name(name)
    views = _open_views(args)
    names = _wanted_names(args, is_timed=all(view.is_timed for view in views))
    results = [_measure(view, names, args) for view in views]
    if args.perfetto or args.diff or args.unclassified or args.picture:
        _require_times(views)
    if args.picture:
        _write_pictures(views[-1], Path(args.picture))
    if args.perfetto:
        export_perfetto(views[-1], Path(args.perfetto))
    _print_results(views, results, args)
    return 0 if all(view.ranks for view in views) else 1


def _require_times(views: list[TraceView]) -> None:
    for view in views:
        if not view.is_timed:
            what = "--perfetto, --diff, --picture and --unclassified need times"
            raise UserError(f"{what}: {NO_TIMES}")


def _list_metrics() -> str:
    rows = [(name, METRICS.get(name).unit, METRICS.get(name).summary) for name in METRICS.names()]
    rows += [
        (name, "", f"CCL-Bench's name, computed from {a.metric}") for name, a in ALIASES.items() if name != a.metric
    ]
    rows += [("collective_vol_*", "GB/step", "CCL-Bench's name, computed from comm_volume")]
    rows += [("bandwidth_utilization_*", "GB/s", "CCL-Bench's name, computed from bus_bw")]
    rows += [(STEP_SCORE, "score", "CCL-Bench's combined score: w N0/N + (1-w) T0/T")]
    return format_table(("metric", "unit", "meaning"), rows)


def _wanted_names(args: argparse.Namespace, *, is_timed: bool) -> list[str]:
    if args.metric:
        return list(dict.fromkeys(args.metric))
    if _only_tables(args):
        return []
    if args.all or args.json:
        return METRICS.names()
    return list(CORE if is_timed else CORE_WITHOUT_TIMES)


def _only_tables(args: argparse.Namespace) -> bool:
    """Return whether tables were asked for instead of metrics."""
    return bool(args.diff or args.operators or args.unclassified)


def _open_views(args: argparse.Namespace) -> list[TraceView]:
    named: list[str | None] = list(args.card) or ([None] if args.set or args.overlay else [])
    cards = [load_scoring_card(name, args.overlay, args.set) for name in named]
    config = read_config(Path(args.config)) if args.config else None
    views: list[TraceView] = []
    for i, path in enumerate(args.trace):
        baseline = views[0] if views else None
        card = cards[min(i, len(cards) - 1)] if cards else None
        views.append(open_trace(Path(path), card=card, config=config, baseline=baseline, workers=args.workers))
    return views


def _measure(view: TraceView, names: list[str], args: argparse.Namespace) -> dict[str, MetricResult]:
    reference = StepScoreReference(args.reference_accelerators, args.reference_step_time, args.reference_weight)
    results: dict[str, MetricResult] = {}
    for name in [] if args.diagnosis else names:
        results.update(measure_by_name(view, name, reference) if args.metric else {name: METRICS.get(name)(view)})
    return results


def _print_results(views: list[TraceView], results: list[dict[str, MetricResult]], args: argparse.Namespace) -> None:
    if args.json:
        data = [_as_data(view, found, args) for view, found in zip(views, results, strict=True)]
        shown = (
            data[0] if len(data) == 1 else {"a": data[0], "b": data[1], "difference": _compare(views, results, args)}
        )
        print(orjson.dumps(shown, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode())
        return
    print(plain("\n\n".join(filter(None, _text_parts(views, results, args)))))


def _compare(
    views: list[TraceView], results: list[dict[str, MetricResult]], args: argparse.Namespace
) -> dict[str, object]:
    if not args.diff:
        return dict(compare_metrics(*results))
    return {by: [change.as_data() for change in changes] for by, changes in compare_traces(*views).items()}


def _as_data(view: TraceView, found: dict[str, MetricResult], args: argparse.Namespace) -> object:
    if args.diagnosis:
        diagnosis = try_diagnose(view)
        return diagnosis.model_dump(mode="json") if diagnosis else None
    data: dict[str, object] = {name: result.model_dump(mode="json") for name, result in found.items()}
    if args.operators:
        data["operators"] = (build_operator_tree(view) if view.is_timed else build_call_tree(view)).as_data()
    if args.unclassified:
        data["unclassified"] = [asdict(kernel) for kernel in list_unclassified(view)]
    return data


def _text_parts(views: list[TraceView], results: list[dict[str, MetricResult]], args: argparse.Namespace) -> list[str]:
    parts = []
    for path, view in zip(args.trace, views, strict=True):
        trace = view.trace_set
        ranks = f"{len(view.ranks)} of {view.world_size} ranks" if view.world_size else _count_ranks(view)
        heading = f"{path}: {ranks}, {trace.status}"
        if trace.message:
            heading += f" ({trace.reason}: {trace.message})" if trace.reason else f" ({trace.message})"
        parts.append(heading if view.is_timed else f"{heading}\nWithout times: {NO_TIMES}")
        whole = not (args.metric or _only_tables(args)) or args.diagnosis
        diagnosis = try_diagnose(view) if whole else None
        if diagnosis:
            parts.append(format_diagnosis(diagnosis))
        if (whole or args.steps) and view.ranks and view.is_timed:
            parts.append(format_ranks(view, by_step=args.steps))
        if args.operators and view.ranks:
            parts.append(_format_tree(view))
        if args.unclassified and view.ranks:
            is_cpu = all(one.table.accelerator == "cpu" for one in view.ranks.values())
            parts.append(NO_KERNELS if is_cpu else format_unclassified(list_unclassified(view), view.covered))
    if args.diff:
        parts.append(format_changes(compare_traces(*views), [view.covered for view in views]))
    if len(results) == 2:
        return [*parts, format_comparison(*results) if results[0] else ""]
    shown = results[0] if views[0].ranks or args.metric else {}
    return [*parts, format_metrics(shown) if shown else ""]


def _format_tree(view: TraceView) -> str:
    if view.is_timed:
        return format_operators(build_operator_tree(view))
    return format_call_tree(build_call_tree(view), view.covered)


def _count_ranks(view: TraceView) -> str:
    """Return the number of ranks of a trace that does not say how many the run has."""
    return f"{len(view.ranks)} rank{'' if len(view.ranks) == 1 else 's'} (the trace does not say of how many)"


def _write_pictures(view: TraceView, folder: Path) -> None:
    from cclsearch.charts.timeline import draw_timeline
    from cclsearch.report.write import write_picture
    from cclsearch.trace.score import try_diagnose
    from cclsearch.trace.timeline import draw_breakdown, find_lanes

    diagnosis = try_diagnose(view)
    if diagnosis is None:
        return
    charts = {"breakdown.svg": draw_breakdown(diagnosis), "timeline.svg": draw_timeline(find_lanes(view))}
    for name, chart in charts.items():
        if chart is not None:
            write_picture(chart, folder / name)
