"""`ccl-search status`: the state of one search, or of all searches of the project."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from cclsearch.cli.output import show
from cclsearch.core.errors import UserError
from cclsearch.core.terminal import print_wrapped
from cclsearch.core.text import count_of, one_line, plain
from cclsearch.propose.agent.arbiter.states import format_moves
from cclsearch.propose.events import ArbiterMove, LlmTurn, leave_out_outdated
from cclsearch.record.event import Event, TrialFinished, TrialRevised
from cclsearch.record.trial import TrialState, describe_counts
from cclsearch.report.figures import find_figure
from cclsearch.report.summary import best_as_json, summarize_run
from cclsearch.report.terminal import describe_result, result_text
from cclsearch.run.annotations import read_annotations
from cclsearch.run.catalog import find_run, list_runs, name_run
from cclsearch.run.folder import RunFollower, load_run, load_runs, resume_command
from cclsearch.tasks.base import task_of


def run(args: argparse.Namespace) -> None:
    if args.openmetrics:
        if args.json:
            raise UserError("--json and --openmetrics are two formats: give one of them")
        _print_openmetrics(list_runs(args.runs) if args.run is None else [find_run(args.run, args.runs)])
    elif args.run is None:
        _list_all(list_runs(args.runs), as_json=args.json)
    else:
        _show_one(find_run(args.run, args.runs), as_json=args.json)


def _print_openmetrics(folders: list[Path]) -> None:
    from cclsearch.export.tables import render_openmetrics

    def skip(name: str, error: UserError) -> None:
        if len(folders) == 1:
            raise error
        print(f"note: {name} is left out: {one_line(str(error))}", file=sys.stderr)

    runs = list(load_runs(folders, skip))
    print(render_openmetrics(runs, time.time()), end="")


def _list_all(folders: list[Path], *, as_json: bool) -> None:
    rows: list[dict[str, object]] = []
    lines = []
    for folder in folders:
        try:
            run = load_run(folder)
            metric, figure = task_of(run.spec.card).primary_metric, find_figure(run.spec)
        except UserError as error:
            rows.append({"run": folder.name, "standing": "unreadable", "why": str(error)})
            lines.append(f"{folder.name}  unreadable: {one_line(str(error))}")
            continue
        best, ends = run.state.best, run.state.trials.counts
        rows.append(
            {
                "run": folder.name,
                "standing": run.status,
                "trials": len(run.state.trials),
                "admitted": ends[TrialState.ADMITTED],
                f"best_{metric.name}": best.outcome.metrics.get(metric.name) if best and best.outcome else None,
                "best_config": str(best.config) if best else None,
                "provenance": run.spec.provenance.value,
                "damage": run.state.damage,
            }
        )
        result = f"best {figure.format(best)} ({run.spec.provenance.value})  {best.config}" if best else ""
        tags = read_annotations(folder).tags
        tagged = f"  [{', '.join(tags)}]" if tags else ""
        lines.append(f"{folder.name}  {run.status}; {describe_counts(ends)}; {result or 'no best yet'}{tagged}")
    start = "no searches yet; start one: ccl-search run --workload wl2 --budget 15"
    show(rows, lines or [start], as_json=as_json)


def _show_one(folder: Path, *, as_json: bool) -> None:
    lines: dict[int, str] = {}

    def describe(event: Event) -> None:
        """Describe a trial when it ends, while it is in memory: later it would be read once more."""
        if isinstance(event, TrialFinished | TrialRevised):
            lines[event.trial] = plain(describe_result(follower.state.trials[event.trial], figure))

    follower = RunFollower(folder)
    figure = find_figure(follower.spec)
    run = follower.read(describe)
    state, spec = run.state, run.spec
    reported = leave_out_outdated(state.reported)
    total = max(spec.limits.budget, state.budget_raised_to)
    if as_json:
        best = best_as_json(spec, state, folder)
        trials = [
            {"trial": t.number, "purpose": t.purpose.value, "config": dict(t.config), "proposer": t.proposer}
            | {"result": result_text(t, figure, as_data=True)}
            for t in state.trials.values()
        ]
        notes = [{"topic": event.label, "text": event.text} for event in reported]
        facts = {"run": spec.run_id, "standing": run.status, "budget": total, "spent": state.num_spent}
        print(json.dumps({**facts, "best": best, "trials": trials, "notes": notes, "damage": state.damage}))
        return
    lost = sum(b.failure is not None and b.failure.is_infrastructure for b in state.trials.briefs.values())
    unjudged = sum(brief.state is TrialState.UNJUDGED for brief in state.trials.briefs.values())
    listed = [count_of(n, noun) for n, noun in ((lost, "infrastructure failure"), (unjudged, "judging error")) if n]
    uncounted = f" ({' and '.join(listed)} {'does' if lost + unjudged == 1 else 'do'} not count)" if listed else ""
    print(f"{spec.run_id}: {run.status}; {state.num_spent} of {total} trials used{uncounted}; {spec.proposers}")
    for line in read_annotations(folder).describe():
        print_wrapped(line)
    for line in spec.banner:
        print_wrapped(f"note: {line}")
    for number in sorted(state.trials):
        print(lines.get(number) or plain(describe_result(state.trials[number], figure)))
    for line in format_moves(reported):
        print(line)
    for event in [event for event in reported if not isinstance(event, ArbiterMove | LlmTurn)][-5:]:
        print(f"{event.label}: {one_line(event.text)}")
    for line in summarize_run(spec, state, folder):
        print_wrapped(line)
    if run.status.is_resumable:
        print(f"continue: {resume_command(spec, state, name_run(folder))}")
