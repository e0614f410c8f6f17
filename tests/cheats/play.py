"""Plays searches over tricks and honest trials, and reads the verdicts, for benchmarks/cheats.py and tests."""

from __future__ import annotations

import ast
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cclsearch.analysis.re_evaluate import re_evaluate_run
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

CHEATS = Path(__file__).parent
TRICKS_FILE = "tricks.json"
MODULES = {
    "work_tricks": "less or other work",
    "numeric_tricks": "precision, recomputation, layout",
    "time_tricks": "step times",
    "trace_tricks": "traces and results",
    "rehearsal_tricks": "work before the timed window, or after it",
    "serving_tricks": "serving",
    "unseen_time": "unseen: the timed window",
    "unseen_layout": "unseen: layout, helpers, memory",
    "unseen_trace": "unseen: losses, traces, results",
    "unseen_serving": "unseen: serving",
}
"""Files of the tricks, in the order of the table -> the group's name. Who wrote the unseen ones knew no rule."""
EDITED = "result_edited_afterwards"
Layout = Mapping[str, Value]
LAYOUTS = read_yaml(CHEATS / "layouts.yaml")
LAYOUT: Layout = LAYOUTS["training"]["usual"]
LAYOUT_OF: Mapping[str, Layout] = LAYOUTS["training"]["tricks"]
"""Trick -> what differs from the usual layout."""
HONEST: Sequence[Layout] = LAYOUTS["training"]["honest"]


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
MAJORITY: Sequence[Entry] = [(trick, layout) for trick, layout in LAYOUTS["training"]["majority"]]
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
    folder, given = runs / run_id, LAYOUTS[task]
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
        is_known = best is not None and trial.loss is not None
        gain = (
            (best / trial.loss if best > 0 else trial.loss / best) if is_known else 1.0
        )  # the loss of a rate is below 0
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
    wrong = [verdict for verdict in found.now.verdicts if verdict.ok is False]
    names, details = tuple(verdict.rule for verdict in wrong), tuple(verdict.detail for verdict in wrong)
    is_believed = found.now.is_ranked and found.now.loss != found.then.loss
    return Row(EDITED, number, is_believed, names, details)


def play(entries: Sequence[Entry], runs: Path, run_id: str, task: str = "training") -> tuple[Path, list[Row]]:
    """Run a search over these, each ranked trick as if it were the best trial too; return its folder and rows."""
    folder = run_cheats(entries, runs, run_id, task)
    judge_as_best(folder)
    return folder, read_rows(folder)
