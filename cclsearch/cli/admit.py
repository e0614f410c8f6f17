"""`ccl-search admit RUN`: re-evaluate from the evidence on disk which trials are admitted, and why."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from cclsearch.analysis.re_evaluate import (
    ReEvaluation,
    is_spec_unchanged,
    re_evaluate_run,
    re_evaluate_trial,
    write_revisions,
)
from cclsearch.cli import EXIT_DEFECT, EXIT_FAILED, EXIT_OK
from cclsearch.cli.output import show
from cclsearch.core.errors import UserError, writing_to
from cclsearch.core.text import format_table, one_line
from cclsearch.run.catalog import find_run
from cclsearch.run.folder import Run, load_run


def run(args: argparse.Namespace) -> int:
    loaded = load_run(find_run(args.run, args.runs))
    if args.trial is not None:
        trial = loaded.find_trial(args.trial)
        if trial.outcome is None:
            raise UserError(f"run {loaded.spec.run_id!r}: trial {args.trial} has not finished")
        re_evaluated = [re_evaluate_trial(loaded, trial)]
    else:
        re_evaluated = re_evaluate_run(loaded)
    if args.write:
        with writing_to(loaded.folder):
            write_revisions(loaded, re_evaluated)
    changed = not is_spec_unchanged(loaded)
    lines = _describe(loaded, re_evaluated, changed, whole=args.trial is not None, is_written=args.write)
    show(_as_json(loaded, re_evaluated, changed), lines, as_json=args.json)
    if any(entry.is_unjudged for entry in re_evaluated):
        return EXIT_DEFECT
    is_ok = not changed and not any(entry.is_lost or entry.changed for entry in re_evaluated)
    return EXIT_OK if is_ok else EXIT_FAILED


def _describe(
    run: Run, re_evaluated: list[ReEvaluation], changed: bool, *, whole: bool, is_written: bool
) -> Iterator[str]:
    admitted = sum(entry.now.is_ranked for entry in re_evaluated)
    yield f"{run.spec.run_id} ({run.spec.provenance.value}): {admitted} of {len(re_evaluated)} trials admitted"
    for entry in re_evaluated:
        mark = "admitted" if entry.now.is_ranked else "failed" if entry.now.failure else "refused"
        lost = "  [ranked in the ledger]" if entry.is_lost else "  [evidence changed]" if entry.changed else ""
        reason = f"  {one_line(entry.reason, 240)}" if entry.reason else ""
        yield f"  {entry.trial.number:>4}  {mark:<9} {entry.trial.config}{reason}{lost}"
        if whole:
            signs = {True: "ok", False: "NO", None: "--"}
            rows = [(signs[verdict.ok], verdict.rule, one_line(verdict.detail, 240)) for verdict in entry.now.verdicts]
            yield format_table((), rows, indent=" " * 8)
    if any(entry.is_lost for entry in re_evaluated):
        ledger = "The ledger has their new results." if is_written else "`--write` revises them in the ledger."
        yield f"The evidence of the marked trials no longer supports their ranking. {ledger}"
    if any(entry.changed for entry in re_evaluated):
        yield "Evidence changed since it was judged: these trials keep their verdicts, by the values in the ledger."
    if changed:
        yield "search.yaml was changed after the search started: it no longer contains the inputs of the trials"


def _as_json(run: Run, re_evaluated: list[ReEvaluation], changed: bool) -> dict[str, object]:
    return {
        "run": run.spec.run_id,
        "provenance": run.spec.provenance.value,
        "inputs_unchanged": not changed,
        "trials": [
            {
                "trial": entry.trial.number,
                "config": dict(entry.trial.config),
                "admitted": entry.now.is_ranked,
                "admitted_in_ledger": entry.then.is_ranked,
                "reason": entry.reason,
                "verdicts": [verdict.model_dump(mode="json") for verdict in entry.now.verdicts],
            }
            for entry in re_evaluated
        ],
    }
