"""`ccl-search export RUN`: export a search as a table, an Optuna study, or entries of CCL-Bench."""

from __future__ import annotations

import argparse
import sys

from cclsearch.cli import EXIT_FAILED, EXIT_OK
from cclsearch.cli.output import say
from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import count_of, plain
from cclsearch.export.ccl_bench import list_left_out, write_entries
from cclsearch.export.tables import write_csv, write_optuna, write_parquet
from cclsearch.record.trial import Trial, describe_counts
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import Run, load_run
from cclsearch.tracking.base import open_targets, write_run


def run(args: argparse.Namespace) -> int:
    if args.to != "ccl-bench" and (args.trials or args.trial or args.no_traces):
        raise UserError(
            f"--trial, --trials and --no-traces need `--to ccl-bench`: {args.to} contains every trial and no traces"
        )
    loaded = load_run(find_run(args.run, args.runs))
    if args.log_to:
        return _write_to_trackers(loaded, args)
    if args.to == "ccl-bench":
        trials = [_find_trial(loaded, args.trial)] if args.trial else _choose_trials(loaded, args.trials or "ranked")
        folder = args.out or loaded.folder / "ccl-bench"
        made = write_entries(loaded, trials, folder, traces=not args.no_traces)
        say(f"wrote {count_of(len(made), 'card')} with traces, launch and evidence to {folder}", *list_left_out(made))
        return EXIT_OK
    names = {"csv": "trials.csv", "parquet": "trials.parquet", "optuna": "optuna.db"}
    path = args.out or loaded.folder / names[args.to]
    if args.to == "csv":
        write_csv(loaded, path)
    elif args.to == "parquet":
        write_parquet(loaded, path)
    url = write_optuna(loaded, path) if args.to == "optuna" else None
    say(f"wrote {path}: {describe_counts(loaded.state.trials.counts)}")
    if url:
        say(f"open with: optuna-dashboard {url}")
    return EXIT_OK


def _write_to_trackers(run: Run, args: argparse.Namespace) -> int:
    if args.to != "csv" or args.out:
        raise UserError("--log-to excludes --to and --out: it writes to the trackers")
    targets = open_targets(args.log_to)
    problems = write_run(run.folder, run.spec, run.state, targets)
    for problem in problems:
        print(plain(f"note: {problem}"), file=sys.stderr)
    failed = {problem.partition(" writes no more")[0] for problem in problems}
    for target in targets:
        if f"--log-to {target.name}" not in failed:
            say(f"wrote {describe_counts(run.state.trials.counts)} to {redact(target.text)}")
    return EXIT_FAILED if problems else EXIT_OK


def _find_trial(run: Run, number: int) -> Trial:
    trial = run.find_trial(number)
    if trial.outcome is None:
        raise UserError(f"run {run.spec.run_id!r} has no finished trial {number} to export")
    return trial


def _choose_trials(run: Run, which: str) -> list[Trial]:
    finished = [trial for trial in run.state.trials.values() if trial.outcome is not None]
    ranked = [trial for trial in finished if trial.loss is not None]
    best = run.state.best
    chosen = {"all": finished, "ranked": ranked, "best": [best] if best else []}[which]
    if not chosen:
        raise UserError(f"run {run.spec.run_id!r} has no {which if which != 'all' else 'finished'} trial to export")
    return chosen
