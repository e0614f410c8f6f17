"""The search loop over a recording: it spends its budget, repeats no configuration and loses no trial if killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cclsearch.cli import main
from cclsearch.run.folder import Run, load_run

SEARCH = ["run", "--workload", "wl2", "--launcher", "replay", "--name", "r"]


def run_to_end(*more: str) -> Run:
    assert main([*SEARCH, "--quiet", *more]) == 0
    return load_run(Path("runs") / "r")


def test_a_search_spends_its_budget_on_different_configurations(project: Path) -> None:
    run = run_to_end("--budget", "15")
    assert len(run.state.trials) == 15
    assert len({trial.config for trial in run.state.trials.values()}) == 15
    assert run.status == "ended"
    assert run.state.best is not None


def test_the_same_seed_gives_the_same_search(project: Path) -> None:
    first = [str(t.config) for t in run_to_end("--budget", "6").state.trials.values()]
    assert main([*SEARCH[:-1], "again", "--quiet", "--budget", "6"]) == 0
    again = load_run(Path("runs") / "again")
    assert [str(t.config) for t in again.state.trials.values()] == first


def test_a_replayed_search_is_marked_recorded_in_its_output(project: Path, cli) -> None:
    shown = cli.out([*SEARCH, "--budget", "3"])
    assert "recorded measurements, no trial runs here" in shown
    assert "256 x 4096 tokens/step on 16 x h100 with nanotron" in shown
    assert "To search wl2 itself, use `--launcher simulate`" in shown
    assert "no trial runs here" in shown
    assert "not wl2" in shown
    best = cli.json(["best", "r", "--json"])
    assert best["provenance"] == "recorded"
    assert set(best) >= {"run", "trial", "config", "step_time_s", "tokens_per_s", "evidence", "provenance"}
    assert Path(best["evidence"], "result.json").is_file()


def test_resume_with_a_larger_budget_continues_the_search(project: Path) -> None:
    first = list(run_to_end("--budget", "4").state.trials.values())
    assert main(["resume", "r", "--budget", "9", "--quiet"]) == 0
    run = load_run(Path("runs") / "r")
    assert len(run.state.trials) == 9
    assert list(run.state.trials.values())[:4] == first


def test_confirming_a_replayed_search_is_refused(project: Path, cli) -> None:
    run_to_end("--budget", "3")
    assert "cannot be confirmed by another run" in cli.err(["resume", "r", "--confirm", "2"])


def test_parallel_trials_are_all_different(project: Path) -> None:
    run = run_to_end("--budget", "12", "--parallel", "4")
    assert len({trial.config for trial in run.state.trials.values()}) == 12


@pytest.mark.parametrize("change", ["card", "spec", "newer"])
def test_changed_inputs_are_refused_at_resume(project: Path, change: str, cli) -> None:
    run_to_end("--budget", "2")
    path = Path("runs") / "r" / "search.yaml"
    text = path.read_text()
    changed = {
        "card": text.replace("global_batch_size: 256", "global_batch_size: 128"),
        "spec": text.replace("schema_version: 1", "schema_version: 1\nunknown_field: 1"),
        "newer": text.replace("schema_version: 1", "schema_version: 999"),
    }[change]
    assert changed != text
    path.write_text(changed)
    message = cli.err(["resume", "r", "--budget", "4"])
    assert {"card": "edited", "spec": "unknown_field", "newer": "newer"}[change] in message
    assert message.count("\n") == 1


BAD = [
    (["run", "--workload", "nope"], "wl2"),
    (["run", "--workload", "wl2", "--budget", "0"], "at least 1"),
    (["run", "--workload", "wl2", "--budget", "-3"], "at least 1"),
    (["run", "--workload", "wl2", "--budget", "many"], "whole number"),
    (["run", "--workload", "wl2", "--launcher", "replay", "--sampler", "nope"], "random"),
    (["run", "--workload", "wl2", "--launcher", "nope"], "slurm-generic"),
    (["run", "--workload", "wl2", "--launcher", "replay", "--objective", "nope"], "step_time"),
    (["run", "--workload", "wl2", "--launcher", "replay", "--llm", "nope"], "anthropic:MODEL"),
    (["run", "--workload", "wl2", "--launcher", "replay", "--strategy", "hybrid"], "--llm"),
    (["run", "--workload", "wl2", "--launcher", "replay", "--name", "../escape"], "../escape"),
    (["run", "--workload", "wl3", "--objective", "energy"], "--launcher"),
    (["run", "--workload", "wl2", "--recording", "nope"], "nanotron-8b-2n"),
    (["run", "--workload", "wl2", "--bogus"], "--bogus"),
    (["run"], "--workload"),
    (["resume", "nope"], "there are no runs in"),
    (["best", "nope"], "there are no runs in"),
    (["show", "nope", "1"], "there are no runs in"),
    (["bogus"], "there is no command"),
]


@pytest.mark.parametrize(("command", "message"), BAD, ids=[" ".join(command) for command, _ in BAD])
def test_bad_input_gives_one_line_and_creates_nothing(
    project: Path, command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (project / "runs").exists()


def test_an_unwritable_runs_folder_is_refused(project: Path, cli) -> None:
    (project / "file").write_text("")
    assert "cannot create the run folder" in cli.err([*SEARCH, "--runs", "file/runs"])


def test_a_dry_run_shows_space_and_proposals_and_writes_nothing(project: Path, cli) -> None:
    shown = cli.out([*SEARCH, "--dry-run"])
    assert "valid configurations" in shown
    assert "first proposals" in shown
    assert not (project / "runs").exists()
