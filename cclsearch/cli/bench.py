"""`ccl-search bench`: compares samplers on recorded landscapes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from cclsearch.cli.output import say
from cclsearch.core.errors import UserError, require_writable, writing_to
from cclsearch.core.text import format_table
from cclsearch.loop.bench import DEFAULT_SAMPLERS, run_bench
from cclsearch.propose.study.choose import list_samplers

LEGEND = """\
best/optimum: loss of the best trial over the lowest of the landscape (1 = optimum). "after K": geometric mean over
searches after K trials; "median K", "p90 K", "worst K": of the same searches. "in 5%": share of searches within 5% of
the optimum. "to 5%": mean trials to get there. "failed", "dupl.": share of trials that failed, and that repeat
an earlier one."""


def run(args: argparse.Namespace) -> None:
    samplers = [name for text in args.samplers or DEFAULT_SAMPLERS for name in text.split(",") if name]
    if not samplers:
        raise UserError(f"--samplers is empty; choose from: {', '.join(list_samplers())}")
    if "all" in samplers:
        samplers = list_samplers()
    if args.json:
        require_writable(args.json, "--json")
    figures = run_bench(
        args.folder,
        samplers=list(dict.fromkeys(samplers)),
        seeds=args.seeds,
        budget=args.budget,
        workers=args.workers,
        progress=lambda line: print(line, file=sys.stderr),
    )
    if args.json:
        with writing_to(args.json):
            args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    _print_figures(figures, overall_only=args.quiet)


def _print_figures(figures: dict[str, Any], *, overall_only: bool) -> None:
    samplers = figures["samplers"]
    print(LEGEND)
    if not overall_only:
        for landscape in figures["landscapes"]:
            say(f"\n{landscape}")
            _print_table({name: summary["landscapes"][landscape] for name, summary in samplers.items()})
        for landscape, notes in figures["notes"].items():
            say(*(f"{landscape}: {note}" for note in notes))
    print(f"\nall {figures['num_landscapes']} landscapes x {figures['seeds']} seeds (recorded measurements)")
    _print_table(samplers)
    if any(summary["num_cells"] for summary in samplers.values()):
        _print_regret(samplers)


def _print_regret(samplers: dict[str, Any]) -> None:
    """Print the mean regret over the landscapes with a limit, as tuners of servers are compared."""
    for key, title in (("regret", "with a limit"), ("regret_of_many", "with a limit and at least 8 configurations")):
        rows = {name: summary[key] for name, summary in samplers.items() if summary[key] is not None}
        if not rows:
            continue
        print(f"\nregret (1 - best/optimum of what is maximized; 1 until a trial keeps the limit), landscapes {title}")
        milestones = list(next(iter(rows.values())))
        cells = [(name, *(f"{regret[k]:.3f}" for k in milestones)) for name, regret in rows.items()]
        heads = ["sampler", *(f"after {k}" for k in milestones)]
        print(format_table(heads, cells, right=range(1, len(heads)), indent="  "))


def _print_table(rows: dict[str, Any]) -> None:
    milestones = list(next(iter(rows.values()))["best_over_optimum"]["gmean"])
    last = milestones[-1]
    heads = [f"after {k}" for k in milestones]
    heads += [f"{statistic} {last}" for statistic in ("median", "p90", "worst")]
    heads += ["in 1%", "in 5%", "to 5%", "failed", "dupl.", "ms/trial"]
    lines = []
    for name, figures in rows.items():
        ratio = figures["best_over_optimum"]
        to_5 = figures["trials_to_within_5pct"]
        cells = [name, *(f"{ratio['gmean'][k]:.3f}" for k in milestones)]
        cells += [f"{ratio[key][last]:.3f}" for key in ("median", "p90", "worst")]
        cells += [f"{figures[key][last]:.0%}" for key in ("within_1pct", "within_5pct")]
        cells += ["-" if to_5 is None else f"{to_5:.1f}"]
        cells += [f"{figures[key]:.1%}" for key in ("failed_share", "duplicate_share")]
        cells += [f"{1000 * figures['engine_s_per_trial']:.1f}"]
        lines.append(cells)
    print(format_table(["sampler", *heads], lines, right=range(1, len(heads) + 1), indent="  "))
