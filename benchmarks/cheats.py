"""Runs the tricks of tests/cheats among honest trials, and prints which rule refused each.

One search has all tricks of `tiny`, another those of `tiny-serving`: honest layouts first, then the tricks, then honest
layouts again. Each trick is a real run script that really trains or serves. One that is ranked is then treated as the
best trial of a search: its timed window is computed again in another layout, with its nonce. At the end `result.json`
of one honest trial is edited, and the run is judged again.

    python benchmarks/cheats.py --runs /tmp/cheats [--only half_sequence three_layers] [--more FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cclsearch.analysis.re_evaluate import re_evaluate_run
from cclsearch.core.text import count_of
from cclsearch.core.trust import confirm
from cclsearch.core.values import Config, Value
from cclsearch.core.yaml_file import read_yaml
from cclsearch.loop import loop
from cclsearch.loop.session import Session, begin_or_resume, open_session
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.record.event import Purpose
from cclsearch.record.trial import Trial
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import create_run, load_run
from cclsearch.run.spec import SearchLimits

CHEATS = Path(__file__).parent.parent / "tests" / "cheats"
TRICKS_FILE = "tricks.json"
MODULES = {
    "work_tricks": "less or other work",
    "numeric_tricks": "precision, recomputation, layout",
    "time_tricks": "step times",
    "trace_tricks": "traces and results",
    "rehearsal_tricks": "work before the timed window, or after it",
    "serving_tricks": "serving",
}
"""Files of the tricks, in the order of the table -> the group's name."""
EDITED = "result_edited_afterwards"
Layout = Mapping[str, Value]
_LAYOUTS = read_yaml(CHEATS / "layouts.yaml")
LAYOUT: Layout = _LAYOUTS["training"]["usual"]
LAYOUT_OF: Mapping[str, Layout] = _LAYOUTS["training"]["tricks"]
"""Trick -> what differs from the usual layout."""
HONEST: Sequence[Layout] = _LAYOUTS["training"]["honest"]


@dataclass(frozen=True)
class Row:
    """One trial of the search: its trick, and what the gate said."""

    trick: str
    number: int
    is_ranked: bool
    refused_by: tuple[str, ...]
    details: tuple[str, ...]
    gain: float = 1.0
    """How much better its figure is than that of the best honest trial in its layout: 1.2 is a fifth better."""


Entry = tuple[str, Layout]
"""A trick, or several (`bf16+no_reduction`), or `honest`; what differs from the usual layout."""
MAJORITY: Sequence[Entry] = [(trick, layout) for trick, layout in _LAYOUTS["training"]["majority"]]
"""Three trials with one trick, whose losses agree, before two honest ones."""


def read_tricks() -> dict[str, str]:
    """Return trick -> its docstring, in the order of the files."""
    return {name: words for module in MODULES for name, words in read_module(module).items()}


def read_module(name: str) -> dict[str, str]:
    """Return trick -> its docstring for one file of tricks."""
    tree = ast.parse((CHEATS / "launchers" / f"{name}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    marked = [node for node in functions if any(getattr(d, "id", "") == "trick" for d in node.decorator_list)]
    return {node.name: (ast.get_docstring(node) or "").split("\n")[0] for node in marked}


def list_entries(tricks: Sequence[str], honest: Sequence[Layout]) -> list[Entry]:
    """Return honest layouts, the tricks, and the rest of the honest layouts."""
    layouts: list[Entry] = [("honest", layout) for layout in honest]
    middle = len(honest) // 2 + 1
    return [*layouts[:middle], *((trick, LAYOUT_OF.get(trick, {})) for trick in tricks), *layouts[middle:]]


def make_key(config: Config) -> str:
    """Return the key of a configuration in the file of tricks."""
    return json.dumps(dict(config), sort_keys=True)


def run_cheats(entries: Sequence[Entry], runs: Path, run_id: str = "cheats", task: str = "training") -> Path:
    """Run a search over these and return its folder; an interrupted one is continued."""
    os.environ["CCL_SEARCH_PATH"] = str(CHEATS)
    confirm(CHEATS)
    folder, given = runs / run_id, _LAYOUTS[task]
    if not folder.is_dir():
        first = tuple(
            Config({**given["usual"], **layout, "number": number}) for number, (_, layout) in enumerate(entries)
        )
        # each trick runs to its end, so that its own rule and not an early end refuses it
        limits = SearchLimits(budget=len(first), max_attempts=1, trial_timeout_s=600.0, early_stop=False)
        request = SearchRequest(
            given["card"], limits, framework=given["framework"], sampler="random", first=first, run_id=run_id
        )
        folder = create_run(plan_search(request).spec, runs)
        tricks = {make_key(config): trick for config, (trick, _) in zip(first, entries, strict=True)}
        (folder / TRICKS_FILE).write_text(json.dumps(tricks, indent=1))
    session = open_session(folder)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        loop.run_search(writer, session)
    return folder


def judge_as_best(folder: Path) -> None:
    """Treat each trick that is ranked as the best trial of a search: compute its timed window again."""
    session = open_session(folder)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        for row in read_rows(folder):
            trial = writer.state.trials[row.number]
            if row.trick != "honest" and trial.loss is not None:
                _compute_again(writer, session, trial)


def _compute_again(writer: RunWriter, session: Session, trial: Trial) -> None:
    assert session.comparison is not None
    proposal = session.comparison.propose_recomputation(
        writer.state, loop.view_search(writer, session, budget_left=0), trial
    )
    if proposal is not None:
        loop._record_if_allowed(writer, session, proposal, Purpose.REFERENCE, recomputes=trial.number)
    loop._decide(writer, session, math.inf)


def read_rows(folder: Path) -> list[Row]:
    """Return what the gate says of each trial now, from the ledger; trials that compute others again are left out."""
    tricks, state = json.loads((folder / TRICKS_FILE).read_text()), load_run(folder).state
    finished = [t for t in state.trials.values() if t.outcome is not None and t.purpose is not Purpose.REFERENCE]
    named = [(tricks.get(make_key(trial.config), "honest"), trial) for trial in finished]
    honest: dict[str, float] = {}
    for trick, trial in named:
        if trick == "honest" and trial.loss is not None:
            honest[_layout(trial)] = min(trial.loss, honest.get(_layout(trial), math.inf))
    rows = []
    for trick, trial in named:
        outcome = trial.outcome
        assert outcome is not None
        verdicts = outcome.admission.verdicts if outcome.admission else ()
        wrong = [verdict for verdict in verdicts if verdict.ok is False]
        names, details = [verdict.rule for verdict in wrong], [verdict.detail for verdict in wrong]
        if not wrong and outcome.failure is not None:
            names, details = [outcome.failure.kind.value], [outcome.failure.message]
        best = honest.get(_layout(trial))
        # a loss is a time, or minus the logarithm's argument of a rate: only times and rates are compared here
        gain = 1.0 if best is None or trial.loss is None else best / trial.loss if best > 0 else trial.loss / best
        rows.append(Row(trick, trial.number, outcome.is_ranked, tuple(names), tuple(details), gain))
    return rows


def _layout(trial: Trial) -> str:
    return make_key(Config({knob: value for knob, value in trial.config.items() if knob != "number"}))


def edit_result(folder: Path, number: int) -> Row:
    """Halve the step times in the `result.json` of a finished trial, and judge the run again."""
    path = folder / "trials" / f"{number:04d}" / "result.json"
    text = path.read_text()
    data = json.loads(text)
    path.write_text(json.dumps({**data, "step_times_s": [time_s / 2 for time_s in data["step_times_s"]]}))
    found = next(entry for entry in re_evaluate_run(load_run(folder)) if entry.trial.number == number)
    path.write_text(text)
    wrong = [verdict for verdict in found.verdicts if verdict.ok is False]
    names, details = tuple(verdict.rule for verdict in wrong), tuple(verdict.detail for verdict in wrong)
    return Row(EDITED, number, found.now.is_ranked, names, details)


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


def play(entries: Sequence[Entry], runs: Path, run_id: str, task: str = "training") -> tuple[Path, list[Row]]:
    """Run a search over these, each ranked trick as if it were the best trial too; return its folder and rows."""
    folder = run_cheats(entries, runs, run_id, task)
    judge_as_best(folder)
    return folder, read_rows(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs, which are kept")
    parser.add_argument("--only", nargs="+", help="names of tricks (default: all)")
    parser.add_argument("--honest", type=int, default=len(HONEST), help="number of honest trials")
    args = parser.parse_args()
    words, served, runs = read_tricks(), set(read_module("serving_tricks")), args.runs.absolute()
    chosen = args.only or list(words)
    trained = [trick for trick in chosen if trick not in served]
    entries = list_entries(trained, HONEST[: args.honest])
    folder, rows = play(entries, runs, "cheats") if trained else (runs, [])
    first = next((row.number for row in rows if row.trick == "honest" and row.is_ranked), None)
    if first is not None:
        rows.append(edit_result(folder, first))
    if serving := [(trick, {}) for trick in chosen if trick in served]:
        honest = [("honest", layout) for layout in _LAYOUTS["serving"]["honest"]]
        rows += play([*honest, *serving], runs, "serving", "serving")[1]
    print(f"{render(rows, words)}\n\n{explain(rows)}")
    if trained:
        print(f"\n{name_best(folder, rows)}")
    if not args.only:
        folder, rows = play(MAJORITY, runs, "majority")
        print(f"\nThree trials with one trick, then two honest ones: {count_refused(rows)}; {name_best(folder, rows)}")


if __name__ == "__main__":
    main()
