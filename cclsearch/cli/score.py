"""`ccl-search score`: the metrics and the diagnosis of profiler traces."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from cclsearch.cli.arguments import take
from cclsearch.cli.output import show
from cclsearch.core.errors import UserError, require_writable
from cclsearch.core.text import plain
from cclsearch.core.values import Config
from cclsearch.recording.benchmarks import describe_benchmarks, read_benchmark
from cclsearch.trace.answers.score_request import ScoreRequest, list_metrics, score_request
from cclsearch.trace.ccl_bench import StepScoreReference
from cclsearch.trace.names.kernels import use_classes

if TYPE_CHECKING:
    from cclsearch.card.model import Card


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 if every trace was read, 1 if one could not be read."""
    if args.list:
        print(list_metrics())
        return 0
    paths = [Path(trace) for trace in args.trace]
    read = [read_benchmark(path) for path in paths]
    if found := [each for each in read if each is not None]:
        if len(found) < len(paths):
            raise UserError(
                f"{str(paths[read.index(None)])!r} is not a benchmark result like the others: score it apart"
            )
        data = {str(path): {"tool": tool, "runs": runs} for path, (tool, runs) in zip(paths, found, strict=True)}
        show(data, describe_benchmarks(paths, found), as_json=args.json)
        return 0
    request = ScoreRequest(
        traces=args.trace,
        cards=args.card,
        overlays=args.overlay,
        sets=args.set,
        config=args.config,
        find_inputs=_find_inputs,
        metrics=args.metric,
        all_metrics=args.all or args.json,
        reference=StepScoreReference(args.reference_accelerators, args.reference_step_time, args.reference_weight),
        needs_times=bool(args.perfetto or args.picture),
        **take(args, "diagnosis", "steps", "operators", "unclassified", "diff", "workers"),
    )
    if args.kernel_classes:
        use_classes(Path(args.kernel_classes))
    if args.perfetto:
        require_writable(Path(args.perfetto), "--perfetto")
    scored = score_request(request)
    if args.picture:
        from cclsearch.report.page import write_picture
        from cclsearch.trace.claims import draw_pictures

        for name, chart in draw_pictures(scored.views[-1]).items():
            write_picture(chart, Path(args.picture) / name)
    if args.perfetto:
        from cclsearch.trace.export.perfetto import export_perfetto

        export_perfetto(scored.views[-1], Path(args.perfetto))
    if args.json:
        print(orjson.dumps(scored.as_data(), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode())
    else:
        print(plain(scored.as_text()))
    return 0 if scored.all_read else 1


def _find_inputs(path: Path) -> tuple[Card, Config] | None:
    """The card and configuration of the trial that a trace belongs to; None for a trace outside a run."""
    if not any(parent.name == "trials" for parent in path.resolve().parents):
        return None
    from cclsearch.run.folder import find_trial_inputs  # loads all that reads a run, which most traces do not need

    return find_trial_inputs(path)
