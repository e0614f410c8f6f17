"""Runs the tricks of tests/cheats among honest trials, and prints which rule refused each.

One search has all tricks of `tiny`, another those of `tiny-serving`: honest layouts first, then the tricks, then honest
layouts again. Each trick is a real run script that really trains or serves. One that is ranked is then treated as the
best trial of a search: its timed window is computed again in another layout, with its nonce. At the end `result.json`
of one honest trial is edited, and the run is judged again.

    python benchmarks/cheats.py --runs /tmp/cheats [--only half_sequence three_layers] [--more FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cclsearch.core.text import count_of
from cclsearch.record.event import Purpose
from cclsearch.run.folder import load_run

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cheats"))
from play import (
    EDITED,
    HONEST,
    LAYOUTS,
    MAJORITY,
    MODULES,
    Row,
    edit_result,
    list_entries,
    play,
    read_module,
    read_tricks,
)


def render(rows: Sequence[Row], words: dict[str, str]) -> str:
    """Return the table of docs/reliability.md: trick, verdict and the rules that refused it; then counts by group."""
    tricked = [row for row in rows if row.trick != "honest"]
    lines = [count_refused(rows), "", "| trick | verdict | rules that refuse it |", "| --- | --- | --- |"]
    for row in tricked:
        verdict = f"**admitted**, {row.gain:.2f}x the honest figure" if row.is_ranked else "refused"
        rules = ", ".join(f"`{rule}`" for rule in row.refused_by)
        text = words.get(row.trick, "The step times in `result.json` are halved after the trial.").rstrip(".")
        lines.append(f"| {text} | {verdict} | {rules} |")
    lines += ["", "| group | refused | admitted |", "| --- | --- | --- |"]
    for module, title in MODULES.items():
        names = {*read_module(module), *([EDITED] if module == "trace_tricks" else [])}
        ranked = [row.is_ranked for row in tricked if row.trick in names]
        lines.append(f"| {title} | {ranked.count(False)} | {ranked.count(True)} |")
    alone: dict[str, list[str]] = {}
    for row in tricked:
        if len(row.refused_by) == 1:
            alone.setdefault(row.refused_by[0], []).append(row.trick)
    lines += ["", *(f"only `{rule}` refuses: {', '.join(names)}" for rule, names in sorted(alone.items()))]
    return "\n".join(lines)


def count_refused(rows: Sequence[Row]) -> str:
    """Return how many tricks were refused, and how many honest trials were admitted."""
    honest = [row.is_ranked for row in rows if row.trick == "honest"]
    tricked = [row.is_ranked for row in rows if row.trick != "honest"]
    return (
        f"{tricked.count(False)} of {len(tricked)} tricks refused;"
        f" {honest.count(True)} of {len(honest)} honest trials admitted"
    )


def explain(rows: Sequence[Row]) -> str:
    """Return the reasons of refused trials, refused honest ones first."""
    lines = [f"trial {row.number}, {row.trick}: {'; '.join(row.details)}" for row in rows if row.details]
    lines.sort(key=lambda line: ", honest:" not in line)
    return "\n".join(lines)


def name_best(folder: Path, rows: Sequence[Row]) -> str:
    """Return which trial won the search, and how many reference trials it ran."""
    state = load_run(folder).state
    best = next((row.trick for row in rows if state.best and row.number == state.best.number), "none")
    references = sum(trial.purpose is Purpose.REFERENCE for trial in state.trials.values())
    return f"best: {best}; {count_of(references, 'reference trial')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs, which are kept")
    parser.add_argument("--only", nargs="+", help="names of tricks (default: all)")
    parser.add_argument("--honest", type=int, default=len(HONEST), help="number of honest trials")
    args = parser.parse_args()
    words, served, runs = (
        read_tricks(),
        {**read_module("serving_tricks"), **read_module("unseen_serving")},
        args.runs.absolute(),
    )
    chosen = args.only or list(words)
    trained = [trick for trick in chosen if trick not in served]
    entries = list_entries(trained, HONEST[: args.honest])
    folder, rows = play(entries, runs, "cheats") if trained else (runs, [])
    first = next((row.number for row in rows if row.trick == "honest" and row.is_ranked), None)
    if first is not None:
        rows.append(edit_result(folder, first))
    if serving := [(t, LAYOUTS["serving"]["tricks"].get(t, {})) for t in chosen if t in served]:
        honest = [("honest", layout) for layout in LAYOUTS["serving"]["honest"]]
        rows += play([*honest, *serving], runs, "serving", "serving")[1]
    print(f"{render(rows, words)}\n\n{explain(rows)}")
    if trained:
        print(f"\n{name_best(folder, rows)}")
    if not args.only:
        folder, rows = play(MAJORITY, runs, "majority")
        print(f"\nThree trials with one trick, then two honest ones: {count_refused(rows)}; {name_best(folder, rows)}")


if __name__ == "__main__":
    main()
