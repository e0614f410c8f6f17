"""Metrics, diagnosis and comparison of traces as text tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cclsearch.core.text import format_table, format_value, one_line
from cclsearch.trace.answers.operators import CallNode, NamedChange, OperatorTree, UnknownKernel
from cclsearch.trace.metric import MetricResult, Status
from cclsearch.trace.score import Diagnosis
from cclsearch.trace.view import TraceView

MAX_RANKS_SHOWN = 32
MAX_ROWS_SHOWN = 40
MIN_SHARE_SHOWN = 0.005


def format_metrics(metrics: Mapping[str, MetricResult]) -> str:
    """Return one line per metric: name, value, ranks, steps, and notes."""
    rows = [
        (
            result.name,
            format_value(result.value, result.unit),
            f"{result.n_ranks}/{result.world_size or '?'}" if result.n_ranks else "",
            str(result.n_steps or ""),
            _format_notes(result),
        )
        for result in metrics.values()
    ]
    return format_table(("metric", "value", "ranks", "steps", ""), rows)


def _format_notes(result: MetricResult) -> str:
    detail = result.detail or str(result.reason or "").replace("_", " ")
    status = "" if result.status is Status.OK else f"{result.status.value.replace('_', ' ')}: "
    differs = result.inputs.get("differs")
    source = result.inputs.get("answered_by")
    note = f"{'' if source in (None, result.name) else f'from {source}. '}{differs}" if differs else ""
    return one_line(". ".join(part for part in (status + detail, note) if part), 500)


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """Return the sentences, then a table of seconds by cause."""
    causes = sorted(diagnosis.seconds_by_cause.items(), key=lambda item: -item[1])
    columns = [diagnosis.seconds_by_cause]
    heads = ["cause", "time", "share"]
    if diagnosis.slow_steps:
        columns.append(diagnosis.slow_steps.seconds_by_cause)
        heads = ["cause", "median step", "share", "slow step", "share"]
    rows = [
        (str(cause), *(text for column in columns for text in _format_part(column[cause], sum(column.values()))))
        for cause, _ in causes
        if any(column[cause] for column in columns)
    ]
    rows.append(("total", *(text for column in columns for text in (format_value(sum(column.values()), "s"), ""))))
    return "\n".join([*diagnosis.sentences, "", format_table(heads, rows)])


def _format_part(seconds: float, total: float) -> tuple[str, str]:
    return format_value(seconds, "s"), f"{100 * seconds / total:.1f} %"


def format_ranks(trace: TraceView, *, by_step: bool = False) -> str:
    """Return a table by rank (and by step): the time of a step or of the file, and the shares that add up to it."""
    rows = []
    for rank, view in list(trace.ranks.items())[:MAX_RANKS_SHOWN]:
        parts, windows = view.parts, view.windows
        columns = (parts.compute_ns_W, parts.exposed_comm_ns_W, parts.exposed_mem_ns_W, parts.idle_ns_W)
        if by_step:
            for w, number in enumerate(windows.numbers):
                shares = [f"{100 * int(ns[w]) / int(parts.window_ns_W[w]):.2f} %" for ns in columns]
                step = str(number) if windows.are_steps else "file"
                rows.append((str(rank), step, format_value(int(parts.window_ns_W[w]) / 1e9, "s"), *shares))
        elif len(windows.numbers):
            total = int(parts.window_ns_W.sum())
            shares = [f"{100 * int(ns.sum()) / total:.2f} %" for ns in columns]
            steps = str(windows.num_steps) if windows.are_steps else "file"
            rows.append((str(rank), steps, format_value(total / len(windows.numbers) / 1e9, "s"), *shares))
    length = "step time" if all(view.windows.are_steps for view in trace.ranks.values()) else "time"
    heads = ("rank", "step" if by_step else "steps", length, "compute", "exposed comm", "exposed copies", "idle")
    text = format_table(heads, rows)
    more = len(trace.ranks) - MAX_RANKS_SHOWN
    return f"{text}\n... and {more} more ranks" if more > 0 else text


def compare_metrics(a: Mapping[str, MetricResult], b: Mapping[str, MetricResult]) -> dict[str, dict[str, float | None]]:
    """Return metric -> both values, their difference, and second over first; None if a value is missing."""
    compared: dict[str, dict[str, float | None]] = {}
    for name in a:
        if name not in b:
            continue
        left, right = a[name].value, b[name].value
        both = left is not None and right is not None
        compared[name] = {
            "a": left,
            "b": right,
            "difference": right - left if both and left is not None and right is not None else None,
            "ratio": right / left if both and left and right is not None else None,
        }
    return compared


def format_comparison(a: Mapping[str, MetricResult], b: Mapping[str, MetricResult]) -> str:
    """Return a table with both values, their difference and their ratio."""
    rows = []
    for name, pair in compare_metrics(a, b).items():
        unit = a[name].unit
        ratio, change = pair["ratio"], format_value(pair["difference"], unit)
        reasons = [_format_notes(side[name]) for side in (a, b) if side[name].reason]
        rows.append(
            (
                name,
                format_value(pair["a"], unit),
                format_value(pair["b"], unit),
                "" if pair["difference"] is None or unit == "rank" else change.replace(" %", " points"),
                "" if ratio is None or unit == "rank" else f"x{ratio:.3f}",
                ", ".join(dict.fromkeys(reasons)),
            )
        )
    return format_table(("metric", "first", "second", "difference", "second/first", ""), rows)


def format_changes(changes: Mapping[str, Sequence[NamedChange]], covers: Sequence[str]) -> str:
    """Return one table for each of `families` and `operators`, the largest changes first.

    `covers` names the span over which the time of each of the two traces is a sum.
    """
    parts = []
    for by, found in changes.items():
        rows = [
            (
                one_line(change.name, 90),
                format_value(change.first_s, "s"),
                format_value(change.second_s, "s"),
                f"{'+' if change.change_s > 0 else ''}{format_value(change.change_s, 's')}",
                f"{100 * change.share:+.1f} %",
                f"{change.first_count:g} -> {change.second_count:g}",
            )
            for change in found[:MAX_ROWS_SHOWN]
            if change.share
        ]
        if not rows:
            parts.append(f"{by}: no difference" if found else f"{by}: no launch is recorded inside an operator")
            continue
        total = sum(change.change_s for change in found)
        rows.append(("all", "", "", f"{'+' if total > 0 else ''}{format_value(total, 's')}", "", ""))
        heads = (by, "first", "second", "difference", "share of change", "calls")
        parts.append(format_table(heads, rows))
    sums = covers[0] if covers[0] == covers[1] else f"{covers[0]} in the first trace, {covers[1]} in the second"
    parts.append(
        f"Summed device time {sums}, mean over ranks; the shares count increases and decreases alike."
        f"{_operator_coverage(changes)}"
    )
    return "\n\n".join(parts)


def _operator_coverage(changes: Mapping[str, Sequence[NamedChange]]) -> str:
    """Return the share of each trace's device time that has an operator; "" if all of it has."""
    operators, families = changes.get("operators", ()), changes.get("families", ())
    sides = [
        (sum(getattr(change, side) for change in operators), sum(getattr(change, side) for change in families))
        for side in ("first_s", "second_s")
    ]
    first, second = (part / whole if whole else 1.0 for part, whole in sides)
    if min(first, second) > 0.9995 or not operators:
        return ""
    return f" The operators cover {first:.1%} of it in the first trace and {second:.1%} in the second."


NO_KERNELS = "no kernels: the work of this trace is operators on CPUs, which have no class"


def format_unclassified(kernels: Sequence[UnknownKernel], covers: str = "per step") -> str:
    """Return a table of unknown kernels, and how to classify them; `covers` names the span of their time."""
    if not kernels:
        return "every compute kernel has a class"
    rows = [
        (format_value(kernel.seconds, "s"), f"{100 * kernel.share:.2f} %", f"{kernel.num_kernels:g}", kernel.name[:200])
        for kernel in kernels[:MAX_ROWS_SHOWN]
    ]
    more = len(kernels) - MAX_ROWS_SHOWN
    hint = (
        "Give them a class: add lines such as `gemm,^my_kernel` to kernel_classes.csv in the project's folder, "
        "below the line `class,pattern` (or to the FILE of --kernel-classes)."
    )
    table = format_table(("time", "of compute", "calls", "kernel"), rows)
    sums = f"Summed device time {covers}, mean over ranks."
    return "\n".join(filter(None, (table, f"... and {more} more" if more > 0 else "", sums, hint)))


def format_operators(tree: OperatorTree) -> str:
    """Return the tree as an indented table, without operators below half a percent of the device time."""
    if not tree.nodes:
        return "no launch is recorded inside an operator"
    rows = [
        (
            "  " * (len(node.path) - 1) + one_line(node.path[-1], 90),
            format_value(node.seconds, "s"),
            f"{100 * node.seconds / tree.total_s:.1f} %" if tree.total_s else "",
            f"{node.num_kernels:g}",
        )
        for node in tree.nodes
        if node.seconds >= MIN_SHARE_SHOWN * tree.total_s
    ]
    table = format_table(("operator", "device time", "share", "kernels"), rows)
    return f"{table}\nSummed device time {tree.covers}, mean over ranks; {tree.coverage:.1%} of it has an operator."


def format_call_tree(root: CallNode, covers: str) -> str:
    """Return the tree as an indented table, without nodes below half a percent of the calls and of the FLOP."""
    nodes = list(root.walk())
    calls = sum(node.calls for _, node in nodes)
    flops = sum(node.flops for depth, node in nodes if depth == 0)
    rows = [
        ("  " * depth + one_line(node.name, 90), f"{node.calls:g}", format_value(node.flops, "FLOP") if flops else "")
        for depth, node in nodes
        if node.calls >= MIN_SHARE_SHOWN * calls or (node.flops and node.flops >= MIN_SHARE_SHOWN * flops)
    ]
    if not rows:
        return "no operator is recorded"
    return f"{format_table(('operator', 'calls', 'FLOP'), rows)}\nCalls and FLOP {covers}, mean over ranks."
