"""Warm start: which earlier runs a search learns from, by name or by `auto`, and what a dry run shows of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from recorded_runs import search, write_recording
from scripted_launcher import ScriptedLauncher, ran
from scripted_search import open_search

from cclsearch.cli import main
from cclsearch.core.values import Provenance
from cclsearch.loop.loop import run_search
from cclsearch.loop.session import begin_or_resume
from cclsearch.record.writer import RunWriter
from cclsearch.run.folder import load_run
from cclsearch.run.spec import SPEC_FILE

AUTO = ["run", "--workload", "tiny", "--learn-from", "auto"]


@pytest.fixture
def toy(project: Path) -> Path:
    return write_recording(project / "recordings" / "toy")


def replay(toy: Path, *more: str) -> list[str]:
    return ["run", "--workload", str(toy / "card.yaml"), "--recording", str(toy), *more]


def measure(project: Path, name: str, **hardware: object) -> Path:
    """Return a measured run of `tiny`; `hardware` replaces fields of its card."""
    launcher = ScriptedLauncher(lambda job: ran(job, 1.0 + job.trial, simulated=False))
    launcher.provenance = Provenance.MEASURED  # type: ignore[misc]
    folder, session = open_search(project, launcher, budget=2)
    with RunWriter(folder) as writer:
        begin_or_resume(writer, session)
        run_search(writer, session)
    spec = yaml.safe_load((folder / SPEC_FILE).read_text(encoding="utf-8"))
    spec["card"]["hardware"] |= hardware
    (folder / SPEC_FILE).write_text(yaml.safe_dump(spec), encoding="utf-8")
    return folder.rename(folder.with_name(name))


def test_a_search_can_learn_from_several_runs(toy: Path, project: Path) -> None:
    for name in ("a", "b", "c"):
        search(toy, name, budget=2)
    assert main(replay(toy, "--learn-from", "a", "b", "--learn-from", "c", "--budget", "4", "--name", "d")) == 0
    assert [Path(folder).name for folder in load_run(project / "runs" / "d").spec.learn_from] == ["a", "b", "c"]


def test_a_dry_run_shows_the_first_proposal_of_the_search(
    toy: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search(toy, "a", budget=9)
    first = []
    for more in ((), ("--learn-from", "a")):
        capsys.readouterr()
        assert main(replay(toy, "--dry-run", "--json", *more)) == 0
        first.append(json.loads(capsys.readouterr().out)["proposals"][0]["config"])
        name = f"s{len(more)}"
        assert main(replay(toy, "--budget", "2", "--name", name, "--quiet", *more)) == 0
        assert dict(load_run(project / "runs" / name).state.trials[1].config) == first[-1]
    assert first[1] == {"tp": 1, "pp": 1, "dp": 8, "micro_batch_size": 2}, "the fastest row of the earlier run"


def test_auto_uses_the_runs_measured_on_the_same_cluster(toy: Path, project: Path, cli) -> None:
    search(toy, "recorded", budget=2)
    measure(project, "larger-memory", memory_gib=4096.0)
    measure(project, "other-nodes", accelerators_per_node=64)
    measure(project, "other-chip", accelerator="h100")
    damaged = measure(project, "damaged")
    (damaged / "ledger.jsonl").write_text("{\n", encoding="utf-8")
    for name in ("one", "two"):
        measure(project, name)
    shown = cli.out([*AUTO, "--dry-run"])
    assert "note: warm start from 2 earlier runs: one, two\n" in shown
    assert "note: warm start from 1 earlier run: two\n" in cli.out([*AUTO, "one", "--dry-run"])


def test_auto_without_a_usable_run_gives_a_note(toy: Path, capsys: pytest.CaptureFixture[str], cli) -> None:
    [note] = [line for line in cli.out([*AUTO, "--dry-run"]).splitlines() if "earlier run" in line]
    assert "no earlier run was measured on cpu" in note
    search(toy, "a", budget=2)
    assert main(replay(toy, "--learn-from", "auto", "--budget", "2", "--name", "b")) == 0
    assert "`--learn-from auto` uses measured runs, but this search is recorded" in capsys.readouterr().out
    assert load_run(Path("runs") / "b").spec.learn_from == ()


REPLAY = ["run", "--workload", "wl2", "--launcher", "replay"]


def test_learn_from_refuses_a_run_of_different_work(project: Path, cli) -> None:
    assert main([*REPLAY, "--budget", "3", "--name", "first", "--quiet"]) == 0
    assert main([*REPLAY, "--budget", "2", "--name", "same", "--quiet", "--learn-from", "first"]) == 0
    error = cli.err(["run", "--workload", "tiny", "--name", "unlike", "--learn-from", "first"])
    assert "is not comparable with this search" in error
    for what in ("model", "global batch", "accelerator", "framework", "provenance"):
        assert what in error
    assert error.count("\n") == 1
    assert not (project / "runs" / "unlike").exists()
