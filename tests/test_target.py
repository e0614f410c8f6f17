"""Where a search runs: the profile or recording that planning chooses for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cclsearch.card.load import load_card
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.values import Provenance
from cclsearch.plan.target import choose_target
from cclsearch.run.folder import load_run


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one folder, in which a test may put the commands that its machine has."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def add_tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_slurm_that_nobody_named_gets_nothing_and_the_output_says_how_to_choose_it(
    project: Path, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_tool(tools, "sbatch", f"echo called > {project}/submitted")
    assert main(["run", "--workload", "wl2", "--budget", "2", "--name", "r"]) == 0
    shown = capsys.readouterr().out
    assert "no profile was named, so nothing was submitted: use `--launcher slurm-generic`" in shown
    assert not (project / "submitted").exists()
    assert load_run(project / "runs" / "r").spec.provenance is Provenance.RECORDED


def test_a_machine_with_enough_accelerators_runs_the_workload_itself(project: Path, tools: Path) -> None:
    card = load_card("wl2")
    assert choose_target(card, launcher=None).recording is not None
    add_tool(tools, "nvidia-smi", "for n in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do echo GPU $n: A100; done")
    destination = choose_target(card, launcher=None)
    assert destination.recording is None
    assert destination.profile.launcher == "local"


def test_where_nothing_applies_the_ways_out_are_named(project: Path, tools: Path) -> None:
    with pytest.raises(UserError) as raised:
        choose_target(load_card("wl3"), launcher=None)
    for way in ("--launcher slurm-generic", "--recording FOLDER", "--workload tiny", "16 x a100-40"):
        assert way in str(raised.value)


def test_a_machine_named_for_more_accelerators_than_it_has_is_warned_of(project: Path, tools: Path) -> None:
    [warning] = choose_target(load_card("wl2"), launcher="local").notes
    assert "needs 16 x a100-40, but this machine has none" in warning
    assert choose_target(load_card("tiny"), launcher="local").notes == ()


def test_steps_of_an_allocation_need_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match="SLURM_JOB_ID is not set"):
        choose_target(load_card("wl2"), launcher=None, in_allocation=True)


def test_an_unknown_profile_is_answered_with_profiles_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--workload", "wl2", "--launcher", "nope"]) == 2
    told = capsys.readouterr().err
    assert "slurm-generic" in told
    assert "framework" not in told
