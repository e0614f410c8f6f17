"""Planning a search: its stages, its subject, and how it starts."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from paths import ROOT

import cclsearch
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.launch.local import LocalLauncher
from cclsearch.launch.profile import Profile
from cclsearch.plan.plan import Plan, plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.plugins import TASKS
from cclsearch.run.folder import create_run
from cclsearch.run.spec import SearchLimits
from cclsearch.space.parse import parse_knob

ENGINE = Path(cclsearch.__file__).parent
STAGES = [
    *("load_requested", "choose_target", "choose_objective", "resolve_workload", "choose_strategy"),
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


WINNER = "tp=1,pp=4,dp=4,zero_stage=1,micro_batch_size=1"


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_space_and_predict_are_about_the_recording_that_is_named(project, capsys):
    shutil.copytree(RECORDING, project / "own")
    for name in ("nanotron-8b-2n", "own"):
        space = answer(capsys, "space", "--recording", name)
        assert (space["framework"], space["legal"], space["rules"]) == ("nanotron", 114, [])
        explained = answer(capsys, "space", "explain", "--recording", name, "--config", WINNER)
        assert explained["verdicts"][0]["detail"].startswith("measured: step time 8.99 s")  # type: ignore[index]
        predicted = answer(capsys, "predict", "--recording", name, "--config", WINNER)
        assert predicted["legal"] == 114


def test_a_configuration_that_was_not_measured_is_no_part_of_the_space(cli):
    rejected = ["space", "explain", "--recording", "nanotron-8b-2n", "--config", "tp=16,dp=1,pp=1,zero_stage=1"]
    assert "was not measured; with tp=16 dp=1 pp=1 there are zero_stage=0" in cli.out(rejected, 1)


def test_a_run_gives_its_frozen_card_space_and_framework(project, capsys, cli):
    shutil.copytree(RECORDING, project / "own")
    assert main(["run", "-w", "wl2", "--recording", "own", "--budget", "2", "--name", "first", "--quiet"]) == 0
    capsys.readouterr()
    assert answer(capsys, "space", "--run", "first") == answer(capsys, "space", "--recording", "own")
    assert "run first (nanotron): 114 measured configurations" in cli.out(["space", "--run", "last"])
    assert main(["predict", "--run", "first", "--runs", "runs", "--top", "1"]) == 0


def test_the_knobs_of_a_run_that_measures_are_those_it_was_started_with(project, capsys):
    knobs = (parse_knob("tp=1,2"),)
    plan = plan_search(SearchRequest("tiny", SearchLimits(budget=1), knobs=knobs, run_id="cpu", sets=("seq_len=64",)))
    create_run(plan.spec, project / "runs")
    found = answer(capsys, "space", "--run", "cpu")
    assert found["legal"] == len(plan.space)
    assert main(["predict", "--run", "cpu", "--top", "1"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run -w wl2 -l slurm-generic --recording nanotron-8b-2n", "--launcher slurm-generic and --recording"),
        ("sweep -w wl2 --in-allocation --recording nanotron-8b-2n", "--in-allocation and --record"),
        ("run -w wl2 -l replay --knob nonsense=1,2", "a recording has a fixed search space"),
        ("run -w wl2 -l replay --framework megatron", "measured with 'nanotron'"),
        ("run -w tiny --knob nonsense=1,2", "has no knob 'nonsense'"),
        ("run -w tiny --knob tp=3", "the search space of tiny is empty"),
        ("run -w tiny --set num_heads=7", "must divide num_heads"),
        ("run -w broken.yaml", "broken.yaml"),
        ("run -w text.yaml", "mapping"),
        ("run -w wl2 --recording .", "no card.yaml"),
        ("space", "give --workload NAME, --recording NAME, or --run RUN"),
        ("predict --recording nanotron-8b-2n --set seq_len=8", "--set: --recording has a card and a space of its own"),
        ("space --recording nanotron-8b-2n --workload wl2", "--workload: --recording"),
        ("space --recording nanotron-8b-2 ", "did you mean 'nanotron-8b-2n'?"),
        ("space --run nowhere", "there are no runs in"),
        ("run -w wl2 --launcher replay --set batch_size=33", "was measured with batch_size 256 (not 33)"),
        ("run -w wl2 --launcher replay --set framework=torchtitan", "with framework nanotron (not torchtitan)"),
        ("run -w wl2 --launcher replay --overlay wl3", "nanotron-8b-2n"),
        ("sweep -w wl2 --launcher replay --set num_layers=3", "with num_layers 32 (not 3)"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(words, message, project, cli):
    (project / "broken.yaml").write_text("workload: [\n")
    (project / "text.yaml").write_text("only words\n")
    error = cli.err(words.split())
    assert message in error
    assert error.count("\n") == 1
    assert not (project / "runs").exists()


def test_settings_that_agree_with_the_recording_are_accepted(project):
    same = ("batch_size=256", "accelerator=h100", "memory_gb=80", "description=mine")
    sets = [word for setting in same for word in ("--set", setting)]
    assert main(["run", "-w", "wl2", "--launcher", "replay", "--dry-run", *sets]) == 0


def write_bare_python(folder: Path) -> Path:
    """An interpreter without installed packages."""
    path = folder / "bare-python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return path


def launcher(python: Path, **fields: object) -> LocalLauncher:
    settings = {"python": str(python)}
    profile = Profile.model_validate(
        {"name": "mine", "launcher": "local", "framework": "cpu", "settings": settings, **fields}
    )
    return LocalLauncher.from_profile(profile)


def test_run_without_the_package_of_its_framework_is_refused(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    python = write_bare_python(tmp_path)
    profile = tmp_path / "bare.yaml"
    profile.write_text(f"launcher: local\npython: {python}\n")
    assert main(["trust"]) == 0
    error = cli.err(["run", "--workload", "tiny", "--launcher", str(profile), "--budget", "2"]).splitlines()[-1]
    assert error == (f"ccl-search: torch is not installed for {python}. Run `{python} -m pip install torch`")
    assert not list(tmp_path.glob("runs/*"))


def test_package_in_a_source_folder_is_found(tmp_path):
    python = write_bare_python(tmp_path)
    with pytest.raises(UserError, match="torch is not installed"):
        launcher(python).refuse_at_start()
    (tmp_path / "source" / "torch").mkdir(parents=True)
    (tmp_path / "source" / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    launcher(python, environment={"PYTHONPATH": str(tmp_path / "source")}).refuse_at_start()


def test_interpreter_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError, match="was not found"):
        launcher(tmp_path / "none").refuse_at_start()
