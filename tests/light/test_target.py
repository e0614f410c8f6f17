"""Where a search runs: the profile or recording that planning chooses for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cclsearch.card.load import load_card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Provenance
from cclsearch.plan.target import choose_target
from cclsearch.run.folder import load_run


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set PATH to one empty folder and return it; a test adds the commands that its machine has."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def add_tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_slurm_is_used_only_if_a_profile_is_named(project: Path, tools: Path, cli) -> None:
    add_tool(tools, "sbatch", f"echo called > {project}/submitted")
    shown = cli.out(["run", "--workload", "wl2", "--budget", "2", "--name", "r"])
    assert "to run on Slurm, add `--launcher slurm-generic`; without it nothing is submitted" in shown
    assert not (project / "submitted").exists()
    assert load_run(project / "runs" / "r").spec.provenance is Provenance.RECORDED


def test_a_machine_with_enough_accelerators_runs_trials_locally(project: Path, tools: Path) -> None:
    card = load_card("wl2")
    assert choose_target(card, launcher=None).recording is not None
    add_tool(tools, "nvidia-smi", "for n in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do echo GPU $n: A100; done")
    target = choose_target(card, launcher=None)
    assert target.recording is None
    assert target.profile.launcher == "local"


def test_without_hardware_or_recording_trials_are_simulated_and_the_user_is_told(project: Path, tools: Path) -> None:
    target = choose_target(load_card("wl3"), launcher=None)
    assert target.profile.launcher == "simulate"
    [note] = target.notes
    for words in ("16 x a100-40", "this machine has none", "trials are simulated", "--launcher NAME"):
        assert words in note


def test_nothing_is_simulated_unasked_if_nobody_watches(project: Path, tools: Path) -> None:
    with pytest.raises(UserError, match="`launcher: simulate`, which computes figures"):
        choose_target(load_card("wl3"), launcher=None, may_simulate=False)
    assert choose_target(load_card("wl3"), launcher="simulate", may_simulate=False).profile.launcher == "simulate"
    assert choose_target(load_card("wl2"), launcher=None, may_simulate=False).recording is not None


def test_too_few_local_accelerators_give_a_warning(project: Path, tools: Path) -> None:
    [warning] = choose_target(load_card("wl2"), launcher="local").notes
    assert "needs 16 x a100-40, but this machine has none" in warning
    assert choose_target(load_card("tiny"), launcher="local").notes == ()


def test_in_allocation_needs_a_slurm_allocation(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match="SLURM_JOB_ID is not set"):
        choose_target(load_card("wl2"), launcher=None, in_allocation=True)


def test_an_unknown_profile_lists_only_profiles(project: Path, cli) -> None:
    error = cli.err(["run", "--workload", "wl2", "--launcher", "nope"])
    assert "slurm-generic" in error
    assert "framework" not in error
