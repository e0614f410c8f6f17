"""Framework against framework, each at its best: over recordings that have several, and over runs of equal work."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cclsearch.card.model import FRAMEWORK_KNOBS, PRECISION
from cclsearch.charts.chart import Chart
from cclsearch.charts.compare import draw_frameworks
from cclsearch.charts.trials import varied_knobs
from cclsearch.core.errors import UserError
from cclsearch.core.text import count_of, format_table, one_line, show_number
from cclsearch.core.values import Config, Provenance, format_config
from cclsearch.loop.bench import RecordedTable, limit_recording
from cclsearch.plan.target import find_recording
from cclsearch.recording.load import Recording, load_recording
from cclsearch.recording.table import RowStatus
from cclsearch.report.figures import find_figure
from cclsearch.report.gather import describe_work
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import Run, load_run
from cclsearch.run.spec import SPEC_FILE
from cclsearch.scoring.objective import Objective
from cclsearch.tasks.base import task_of
from cclsearch.trace.claims import ShownClaim

NUMERIC_KNOBS = (PRECISION, "quantisation", "quantization")
"""Knobs that change the computation: only configurations with equal values of them are compared."""


@dataclass(frozen=True)
class Tuned:
    """Measurements of one framework."""

    framework: str
    num_measured: int
    num_ranked: int
    """Number of these that ran and keep the limits."""
    behind: float | None = None
    """Ratio of its best configuration to the best of all frameworks (how many times worse); None if none is ranked."""
    middle: float | None = None
    """Ratio of its middle ranked configuration to its best (how many times worse)."""
    value: float | None = None
    """The figure of its best configuration, in the unit of the case."""
    config: str = ""
    """Its best configuration: the knobs that differ between the configurations of the case."""


@dataclass(frozen=True)
class FrameworkCase:
    """Equal work on equal hardware in at least two frameworks, best first."""

    name: str
    measure: str
    """Metric by which the frameworks are compared, with its unit."""
    provenance: Provenance
    frameworks: tuple[Tuned, ...]


@dataclass(frozen=True)
class _Measured:
    framework: str
    config: Config
    loss: float = math.inf
    """Infinite if it failed or breaks a limit."""
    value: float | None = None


def show_frameworks(sources: Sequence[str], limits: Sequence[str], runs: Path | None = None) -> ShownClaim:
    """Compare the best configurations of frameworks in recordings, and in runs of equal work and hardware.

    `limits` are constraints for recordings with several loads (default: those of the task's bench). Raises UserError
    for a source that is neither a run nor a recording; one without two frameworks is in `missing`.
    """
    recordings, searched = _open_all(sources, runs)
    if limits and searched:
        raise UserError("--limit is for recordings: runs have the constraints that they were searched with")
    cases, missing = [], {}
    for name, found in (*_cases_of_recordings(recordings, limits), *_cases_of_runs(searched)):
        if isinstance(found, str):
            missing[name] = found
        else:
            cases.append(found)
    chart = _draw(cases) if cases else None
    summary = _summarize(cases)
    data: dict[str, object] = {"cases": [asdict(case) for case in cases], "summary": summary}
    return ShownClaim(_write_text(cases, summary), data, chart, missing, len(cases))


def _open_all(sources: Sequence[str], runs: Path | None) -> tuple[list[Recording], list[Run]]:
    recordings, searched = [], []
    for source in dict.fromkeys(sources):
        folder = Path(source).expanduser()
        try:
            searched.append(load_run(find_run(source, runs)))
        except UserError as no_run:
            if (folder / SPEC_FILE).exists():
                raise
            try:
                recordings.append(load_recording(find_recording(source)))
            except UserError as no_recording:
                if folder.is_dir():
                    raise
                raise UserError(f"{source!r} is neither a run nor a recording: {no_run}; {no_recording}") from None
    return recordings, searched


def _cases_of_recordings(
    recordings: Iterable[Recording], limits: Sequence[str]
) -> Iterator[tuple[str, FrameworkCase | str]]:
    for recording in recordings:
        names = {_split(row.config, recording.card.framework)[0] for row in recording.rows}
        if len(names) < 2:
            yield recording.name, _only(names)
            continue
        has_loads = any(len(row.loads) > 1 for row in recording.rows)
        usual = task_of(recording.card).bench_limits if has_loads else ()
        for limit in limits or usual or ("",):
            name = f"{recording.name}, {limit}" if limit else recording.name
            by_precision: dict[str, list[_Measured]] = {}
            for precision, measured in _read_rows(*limit_recording(recording, limit)):
                by_precision.setdefault(precision, []).append(measured)
            for precision, rows in by_precision.items():
                case = f"{name}, {precision}" if len(by_precision) > 1 else name
                yield case, _compare(case, recording.primary.words_with_unit, Provenance.RECORDED, rows)


def _read_rows(recording: Recording, objective: Objective | None) -> Iterator[tuple[str, _Measured]]:
    table = RecordedTable(recording, objective)
    for number, row in enumerate(recording.rows):
        framework, config = _split(row.config, recording.card.framework)
        precision = ", ".join(str(row.config[name]) for name in NUMERIC_KNOBS if name in row.config)
        seen = table.ask(number, number, row.config) if row.status is RowStatus.OK else None
        if seen is None or seen.loss is None:
            yield precision, _Measured(framework, config)
        else:
            yield precision, _Measured(framework, config, seen.loss, seen.metrics.get(recording.primary.name))


def _split(config: Config, framework: str) -> tuple[str, Config]:
    """Return the framework of a configuration, and the configuration without the knob that names it."""
    knob = next((name for name in FRAMEWORK_KNOBS if name in config), None)
    if knob is None:
        return framework, config
    return str(config[knob]), Config({name: value for name, value in config.items() if name != knob})


def _only(names: Iterable[str]) -> str:
    return f"only one framework ({', '.join(names) or 'none'}) has configurations of this work and hardware"


def _cases_of_runs(runs: Sequence[Run]) -> Iterator[tuple[str, FrameworkCase | str]]:
    grouped: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        spec = run.spec
        objective = spec.objective.model_dump_json()
        hardware = (spec.card.hardware, spec.simulated_cluster, spec.provenance)
        key = (spec.card.task, describe_work(spec), hardware, objective)
        grouped.setdefault(key, []).append(run)
    for group in grouped.values():
        spec = group[0].spec
        rows = [measured for run in group for measured in _read_trials(run)]
        name = " and ".join(run.spec.run_id for run in group)
        yield name, _compare(name, find_figure(spec).metric.words_with_unit, spec.provenance, rows)


def _read_trials(run: Run) -> Iterator[_Measured]:
    """The configurations that were run, each with its best ranked trial."""
    bests: dict[Config, _Measured] = {}
    for trial in run.state.trials.values():
        if trial.outcome is None:
            continue
        one = _Measured(*_split(trial.config, run.spec.framework))
        if trial.loss is not None:
            one = replace(one, loss=trial.loss, value=find_figure(run.spec).value(trial))
        bests[trial.config] = min(bests.get(trial.config, one), one, key=lambda each: each.loss)
    yield from bests.values()


def _compare(name: str, measure: str, provenance: Provenance, rows: Sequence[_Measured]) -> FrameworkCase | str:
    by_framework: dict[str, list[_Measured]] = {}
    for row in sorted(rows, key=lambda row: row.loss):
        by_framework.setdefault(row.framework, []).append(row)
    if len(by_framework) < 2:
        return _only(by_framework)
    lowest = min(row.loss for row in rows)
    if math.isinf(lowest):
        return "no configuration of any framework ran and keeps the limit"
    varied = varied_knobs([row.config for row in rows])
    tuned = []
    for framework, found in by_framework.items():
        ranked, best = [row.loss for row in found if not math.isinf(row.loss)], found[0]
        if not ranked:
            tuned.append(Tuned(framework, len(found), 0))
            continue
        config = one_line(format_config({name: best.config[name] for name in varied if name in best.config}), 80)
        middle = ranked[len(ranked) // 2] / best.loss
        tuned.append(Tuned(framework, len(found), len(ranked), best.loss / lowest, middle, best.value, config))
    tuned.sort(key=lambda one: (one.behind is None, one.behind or 0.0, one.framework))
    return FrameworkCase(name, measure, provenance, tuple(tuned))


def _draw(cases: Sequence[FrameworkCase]) -> Chart:
    """Return the chart; each case is named by its differences from the others, and the axis has the rest."""
    parts = [case.name.split(", ") for case in cases]
    shared = [part for part in parts[0] if len(cases) > 1 and all(part in each for each in parts)]
    names = [", ".join(part for part in each if part not in shared) for each in parts]
    words = dict.fromkeys(case.provenance.value for case in cases if case.provenance is not Provenance.MEASURED)
    speeds = [{one.framework: 1 / one.behind for one in case.frameworks if one.behind} for case in cases]
    return draw_frameworks(dict(zip(names, speeds, strict=True)), ", ".join([*shared, *words]))


def _summarize(cases: Sequence[FrameworkCase]) -> dict[str, Any]:
    """Spreads of tuned frameworks, of configurations within one, and how often each is best."""
    spreads = [max(found) for case in cases if len(found := [one.behind for one in case.frameworks if one.behind]) > 1]
    middles = [one.middle for case in cases for one in case.frameworks if one.middle and one.num_ranked > 2]
    return {
        "num_compared": len(spreads),
        "tuned_spread_median": statistics.median(spreads) if spreads else None,
        "tuned_spread_largest": max(spreads, default=None),
        "middle_over_best_median": statistics.median(middles) if middles else None,
        "best": dict(Counter(case.frameworks[0].framework for case in cases)),
    }


def _write_text(cases: Sequence[FrameworkCase], summary: Mapping[str, Any]) -> str:
    if not cases:
        return "no two frameworks to compare"
    head = ("framework", "configurations", "best", "behind the best", "its middle one", "best configuration")
    lines = []
    for case in cases:
        cells = [
            (one.framework, f"{one.num_ranked} of {one.num_measured} ranked", *_cells(one)) for one in case.frameworks
        ]
        marked = case.provenance in (Provenance.SIMULATED, Provenance.RECORDED)
        label = f"{case.name} ({case.provenance.value})" if marked else case.name
        lines.append(f"{label}: {case.measure}\n{format_table(head, cells)}\n")
    lines.append(
        f"{count_of(len(cases), 'case')} of equal work on equal hardware; each framework by its best configuration:"
    )
    if summary["num_compared"]:
        lines.append(
            f"- the slowest framework is {summary['tuned_spread_median']:.2f} times behind the best in the median case,"
            f" {summary['tuned_spread_largest']:.2f} times at most"
        )
    if summary["middle_over_best_median"] is not None:
        lines.append(
            "- the middle configuration of a framework is"
            f" {summary['middle_over_best_median']:.2f} times behind its own best (median)"
        )
    ranked = sorted(summary["best"].items(), key=lambda pair: -pair[1])
    lines.append("- best in: " + ", ".join(f"{framework} {count}" for framework, count in ranked))
    return "\n".join(lines)


def _cells(one: Tuned) -> tuple[str, str, str, str]:
    if one.behind is None:
        return "none", "", "", "no configuration keeps the limit"
    value = "" if one.value is None else show_number(one.value)
    return value, f"{one.behind:.2f} x", f"{one.middle:.2f} x", one.config
