"""`ccl-search pareto RUN...`: the Pareto front of a sweep or of several runs, as a table and charts."""

from __future__ import annotations

import argparse
import json

from cclsearch.analysis.pareto import gather_pareto_page
from cclsearch.cli.output import say
from cclsearch.core.metrics import MetricInfo
from cclsearch.core.text import show_number
from cclsearch.core.values import Provenance
from cclsearch.report.figures import name_value
from cclsearch.report.page import write_pareto_page
from cclsearch.report.pareto import ParetoPage
from cclsearch.run.catalog import find_run, runs_folder
from cclsearch.run.folder import load_run
from cclsearch.scoring.catalog import list_metrics
from cclsearch.scoring.objective import Term
from cclsearch.stats.pareto import parse_weights

DATA_OF_PAGE = ("runs", "provenance", "notes", "objective", "hypervolume", "reference")
DATA_OF_POINT = ("run", "trial", "values", "on_front", "is_knee", "interval")


def run(args: argparse.Namespace) -> None:
    folders = list(dict.fromkeys(find_run(name, args.runs) for name in args.run or ["last"]))
    page = gather_pareto_page(
        [load_run(folder) for folder in folders],
        objective=args.objective,
        metrics=None if args.metrics is None else [name.strip() for name in args.metrics.split(",")],
        weights=None if args.weights is None else parse_weights(args.weights),
    )
    if args.json:
        print(json.dumps(pareto_as_json(page)))
        return
    folder = args.out or (folders[0] if len(folders) == 1 else runs_folder(args.runs))
    written = write_pareto_page(page, folder, png=not args.no_png, dark=args.dark)
    print_pareto(page)
    say(*(f"wrote {path}" for path in written))


def print_pareto(page: ParetoPage) -> None:
    """Print the Pareto front as a table, with the weights that choose each point."""
    mark = Provenance(page.provenance).mark
    say(f"Pareto front{mark}: {len(page.front)} of {len(page.points)} configurations, {len(page.growth)} trials")
    for point in page.front:
        figures = ", ".join(_name_value(axis, value) for axis, value in zip(page.axes, point.values, strict=True))
        extra = "  knee" if point.is_knee else ""
        if point.chosen:
            extra += f"  weights {show_number(point.chosen[0])} to {show_number(point.chosen[1])}"
        name = f"trial {point.trial}" if len(page.runs) == 1 else point.name
        say(f"  {name:<10} {figures}  {point.config_text}{extra}")


def pareto_as_json(page: ParetoPage) -> dict[str, object]:
    """The Pareto front as plain data."""
    points = [
        {key: getattr(point, key) for key in DATA_OF_POINT} | {"config": dict(point.config), "weights": point.chosen}
        for point in page.points
    ]
    weights = [
        {"weight": w, "run": page.points[n].run, "trial": page.points[n].trial, "score": score}
        for w, n, score in page.weights
    ]
    data = {key: getattr(page, key) for key in DATA_OF_PAGE} | {"metrics": [axis.metric for axis in page.axes]}
    return data | {"hypervolume_share_by_trial": page.growth, "points": points, "weights": weights}


def _name_value(axis: Term, value: float) -> str:
    """A figure with words and unit: `step time 0.661 s`."""
    known = list_metrics().get(axis.metric) or MetricInfo(name=axis.metric, unit=None, direction=None, source="script")
    return name_value(known.model_copy(update={"unit": axis.unit}), value)
