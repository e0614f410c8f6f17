"""Planning: its stages run in order, each once; requests that cannot work are refused."""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from paths import ROOT

import cclsearch
from cclsearch.cli import main
from cclsearch.plan.plan import Plan, plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.plugins import TASKS
from cclsearch.run.spec import SearchLimits

ENGINE = Path(cclsearch.__file__).parent
STAGES = [
    "load_requested",
    "choose_target",
    "choose_objective",
    "resolve_workload",
    "choose_strategy",
    "learn_from_earlier",
]
RECORDING = ROOT / "workloads" / "recordings" / "nanotron-8b-2n"
REPLAY = ["run", "--workload", "wl2", "--launcher", "replay"]


def trace_stages(request: SearchRequest) -> tuple[Plan, list[str]]:
    """Return the plan, and the stages in the order in which `plan_search` called them."""
    entered: list[str] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        is_stage = frame.f_code.co_name in STAGES and ENGINE in Path(frame.f_code.co_filename).parents
        if event == "call" and is_stage and frame.f_back and frame.f_back.f_code is plan_search.__code__:
            entered.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        plan = plan_search(request)
    finally:
        sys.setprofile(None)
    return plan, entered


@pytest.mark.parametrize("launcher", [None, "slurm-generic"])
def test_planning_runs_each_stage_once_in_order(project, launcher):
    plan, entered = trace_stages(SearchRequest(workload="wl2", limits=SearchLimits(budget=3), launcher=launcher))
    assert entered == STAGES
    assert plan.spec.space_size == len(plan.space) > 0
    assert (plan.spec.strategy, plan.spec.sampler) == ("sampler", "surrogate")


IMPOSSIBLE = [
    (
        ["run", "--workload", "wl2", "--launcher", "slurm-generic", "--recording", str(RECORDING)],
        "--launcher slurm-generic and --recording",
    ),
    (["sweep", "--workload", "wl2", "--in-allocation", "--recording", str(RECORDING)], "--in-allocation and --record"),
    ([*REPLAY, "--knob", "nonsense=1,2"], "a recording has a fixed search space"),
    ([*REPLAY, "--framework", "megatron"], "measured with 'nanotron'"),
    (["run", "--workload", "tiny", "--knob", "nonsense=1,2"], "has no knob 'nonsense'"),
    (["run", "--workload", "tiny", "--knob", "tp=3"], "the search space of tiny is empty"),
    (["run", "--workload", "tiny", "--set", "num_heads=7"], "must divide num_heads"),
    (["run", "--workload", "broken.yaml"], "broken.yaml"),
    (["run", "--workload", "text.yaml"], "mapping"),
    (["run", "--workload", "wl2", "--recording", "."], "no card.yaml"),
]


@pytest.mark.parametrize(("command", "message"), IMPOSSIBLE, ids=[message for _, message in IMPOSSIBLE])
def test_impossible_requests_are_refused_in_one_line(project, command, message, capsys):
    (project / "broken.yaml").write_text("workload: [\n")
    (project / "text.yaml").write_text("only words\n")
    assert main(command) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (project / "runs").exists()


def test_a_misspelled_column_of_a_recording_gives_a_note(project, capsys, monkeypatch):
    folder = project / "mine"
    shutil.copytree(RECORDING, folder)
    table = (folder / "trials.csv").read_text()
    assert table.startswith("tp,") or ",tp," in table.splitlines()[0]
    head, rest = table.split("\n", 1)
    names = ["tpp" if name == "tp" else name for name in next(csv.reader([head]))]
    (folder / "trials.csv").write_text(",".join(names) + "\n" + rest)
    main(["run", "--workload", "wl2", "--recording", "mine", "--dry-run"])
    assert "no column tp" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(type(TASKS.get("training")), "rules", ())
        main(["run", "--workload", "wl2", "--recording", "mine", "--dry-run"])
    assert "no column" not in capsys.readouterr().out, "a task without the rule may use fewer accelerators"


def test_confirm_is_ignored_for_a_recording(project, capsys):
    assert main([*REPLAY, "--budget", "2", "--confirm", "1"]) == 0
    assert "--confirm is ignored: a recorded figure cannot be confirmed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("objective", "use_fewer", "fewer", "said"),
    [(None, False, False, False), ("cost", False, True, True), ("cost", True, True, False)],
)
def test_an_objective_that_counts_accelerators_may_use_fewer_and_says_so(project, objective, use_fewer, fewer, said):
    limits = SearchLimits(budget=3)
    request = SearchRequest("wl5", limits, launcher="simulate", objective=objective, use_fewer=use_fewer)
    plan = plan_search(request)
    assert plan.spec.use_fewer == fewer, "frozen, so that `resume` has the same space"
    assert (plan.space.num_accelerators_N.min() < 16) == fewer
    line = "configurations may use fewer than the 16 accelerators, as with --use-fewer: the objective has"
    assert any(note.startswith(line) for note in plan.spec.banner) == said
