"""Runs the tricks of tests/cheats under the card `tiny`, among honest trials, and prints which rule refused each.

One search holds all of them: honest layouts first, then the tricks, then honest layouts again. Each trick is a real run
script that really trains. At the end `result.json` of one honest trial is edited, and the run is judged again.

    python benchmarks/cheats.py --runs /tmp/cheats [--only half_sequence three_layers]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cclsearch.analysis.re_evaluate import re_evaluate_run
from cclsearch.core.values import Config, Value
from cclsearch.plan.plan import plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import create_run, load_run
from cclsearch.run.spec import SearchLimits
from cclsearch.search.loop import run_search
from cclsearch.search.session import begin_or_resume, open_session

CHEATS = Path(__file__).parent.parent / "tests" / "cheats"
TRICKS_FILE = "tricks.json"
LAYOUT: dict[str, Value] = {
    "tp": 1, "dp": 2, "pp": 1, "micro_batch_size": 2, "activation_checkpointing": "none", "zero_stage": 0,
}  # fmt: skip
LAYOUT_OF: dict[str, dict[str, Value]] = {
    "three_layers_recomputed": {"activation_checkpointing": "full"},
    "full_checkpointing_lied": {"activation_checkpointing": "full"},
    "selective_checkpointing_lied": {"activation_checkpointing": "selective"},
    "last_stage_dropped": {"dp": 1, "pp": 2},
}
"""Trick -> what differs from the usual layout."""
HONEST: tuple[dict[str, Value], ...] = (
    {},
    {"micro_batch_size": 8},
    {"micro_batch_size": 4, "activation_checkpointing": "full"},
    {"dp": 1, "tp": 2, "micro_batch_size": 4},
    {"activation_checkpointing": "selective"},
    {"dp": 1, "pp": 2},
    {"zero_stage": 1, "micro_batch_size": 1},
    {"dp": 1, "micro_batch_size": 8},
    {"dp": 1, "tp": 2, "micro_batch_size": 8, "activation_checkpointing": "full"},
    {"activation_checkpointing": "full"},
    {"dp": 1, "pp": 2, "micro_batch_size": 4, "activation_checkpointing": "full"},
    {"zero_stage": 1, "micro_batch_size": 8},
)


@dataclass(frozen=True)
class Row:
    """One trial of the search: its trick, and what the gate said."""

    trick: str
    number: int
    is_ranked: bool
    refused_by: tuple[str, ...]
    details: tuple[str, ...]


def read_tricks() -> dict[str, str]:
    """Return trick -> its docstring, in the order of the file."""
    tree = ast.parse((CHEATS / "launchers" / "cheats.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    marked = [node for node in functions if any(getattr(d, "id", "") == "trick" for d in node.decorator_list)]
    return {node.name: (ast.get_docstring(node) or "").split("\n")[0] for node in marked}


def make_request(tricks: Sequence[str], honest: Sequence[dict[str, Value]], run_id: str) -> SearchRequest:
    """Return a search over honest layouts, the tricks, and the rest of the honest layouts."""
    before, rest = honest[: len(honest) // 2 + 1], honest[len(honest) // 2 + 1 :]
    tricked = [LAYOUT_OF.get(trick, {}) for trick in tricks]
    layouts = (*before, *tricked, *rest)
    first = tuple(Config({**LAYOUT, **layout, "number": number}) for number, layout in enumerate(layouts))
    limits = SearchLimits(budget=len(first), max_attempts=1, trial_timeout_s=600.0)
    return SearchRequest("tiny", limits, framework="cheats", strategy="random", first=first, run_id=run_id)


def run_cheats(tricks: Sequence[str], honest: Sequence[dict[str, Value]], runs: Path, run_id: str = "cheats") -> Path:
    """Run the search and return its folder; an interrupted one is continued."""
    os.environ["CCL_SEARCH_PATH"] = str(CHEATS)
    folder = runs / run_id
    if not folder.is_dir():
        folder = create_run(plan_search(make_request(tricks, honest, run_id)).spec, runs)
        numbered = dict(enumerate(tricks, start=len(honest) // 2 + 1))
        (folder / TRICKS_FILE).write_text(json.dumps(numbered, indent=1))
    session = open_session(folder)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
    return folder


def read_rows(folder: Path) -> list[Row]:
    """Return what the gate says of each trial now, from the ledger."""
    tricks = json.loads((folder / TRICKS_FILE).read_text())
    rows = []
    for trial in load_run(folder).state.trials.values():
        outcome = trial.outcome
        if outcome is None:
            continue
        verdicts = outcome.admission.verdicts if outcome.admission else ()
        wrong = [verdict for verdict in verdicts if verdict.ok is False]
        names, details = [verdict.rule for verdict in wrong], [verdict.detail for verdict in wrong]
        if not wrong and outcome.failure:
            names, details = [outcome.failure.kind.value], [outcome.failure.message]
        trick = tricks.get(str(trial.config["number"]), "honest")
        rows.append(Row(trick, trial.number, outcome.is_ranked, tuple(names), tuple(details)))
    return rows


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
    return Row("result_edited_afterwards", number, found.now.is_ranked, names, details)


def render(rows: Sequence[Row], words: dict[str, str]) -> str:
    """Return the table: trick, verdict, the rules that refused it, and the first of their reasons."""
    honest = [row for row in rows if row.trick == "honest"]
    tricked = [row for row in rows if row.trick != "honest"]
    lines = [
        f"{sum(not row.is_ranked for row in tricked)} of {len(tricked)} tricks refused;"
        f" {sum(row.is_ranked for row in honest)} of {len(honest)} honest trials admitted",
        "",
        "| trick | verdict | rules | why |",
        "| --- | --- | --- | --- |",
    ]
    for row in tricked:
        verdict = "**admitted**" if row.is_ranked else "refused"
        rules = ", ".join(f"`{rule}`" for rule in row.refused_by)
        text = words.get(row.trick, "The step times in `result.json` are halved after the trial.").rstrip(".")
        lines.append(f"| {text} | {verdict} | {rules} | {row.details[0] if row.details else ''} |")
    for row in honest:
        if not row.is_ranked:
            lines.append(f"| honest, trial {row.number} | **refused** | {', '.join(row.refused_by)} | {row.details} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the run, which is kept")
    parser.add_argument("--only", nargs="+", help="names of tricks (default: all)")
    parser.add_argument("--honest", type=int, default=len(HONEST), help="number of honest trials")
    args = parser.parse_args()
    words = read_tricks()
    folder = run_cheats(args.only or list(words), HONEST[: args.honest], args.runs.absolute())
    rows = read_rows(folder)
    first = next((row.number for row in rows if row.trick == "honest" and row.is_ranked), None)
    if first is not None:
        rows.append(edit_result(folder, first))
    print(render(rows, words))
    best = load_run(folder).state.best
    print(f"\nbest: {next((row.trick for row in rows if best and row.number == best.number), 'none')}")


if __name__ == "__main__":
    main()
