"""Sweeps: one search over joined recordings that measures each configuration once and scores it at every weight."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from recorded_runs import search, write_recording

from cclsearch.analysis.pareto import gather_pareto_page
from cclsearch.cli import EXIT_INTERRUPTED, main
from cclsearch.core.errors import UserError
from cclsearch.loop.sweep import describe_sweep, make_pareto_objective, read_sweep
from cclsearch.plugins import METRICS
from cclsearch.recording.join import find_family, join_recordings
from cclsearch.recording.load import load_recording
from cclsearch.run.folder import load_run
from cclsearch.scoring.catalog import list_metrics


@pytest.fixture
def family(project: Path) -> Path:
    """Return a folder with recordings of the same work on 4, 8 and 16 accelerators, and one of different work."""
    folder = project / "recordings"
    for size in (4, 8, 16):
        write_recording(folder / f"toy-{size}", size)
    different = write_recording(folder / "other", 8)
    card = (different / "card.yaml").read_text().replace("batch_size: 64", "batch_size: 32")
    (different / "card.yaml").write_text(card, encoding="utf-8")
    return folder


def over(family: Path, *more: str, command: str = "sweep") -> list[str]:
    """Return the command line of a sweep (or search) `s` that begins at the recording on 8 accelerators."""
    toy = family / "toy-8"
    named = [] if "--dry-run" in more else ["--name", "s"]
    return [command, "--workload", str(toy / "card.yaml"), "--recording", str(toy), *named, *more]


def test_only_recordings_of_the_same_work_are_joined(family, project):
    members = find_family(family / "toy-8")
    assert [member.name for member in members] == ["toy-4", "toy-8", "toy-16"]
    joined = load_recording(join_recordings(members, project / "joined"))
    assert len(joined.rows) == 27
    assert joined.card.hardware.num_accelerators == 16
    assert sorted(set(joined.space.num_accelerators_N.tolist())) == [4, 8, 16]
    assert join_recordings(members, project / "joined") == joined.folder
    with pytest.raises(UserError, match="cannot be joined"):
        join_recordings([members[0], load_recording(family / "other")], project / "joined")


def test_a_sweep_measures_once_and_scores_at_every_weight(family, capsys, cli):
    assert main(over(family, "--budget", "8", "--weights", "0:1:0.25")) == 0
    capsys.readouterr()
    run = load_run(Path("runs") / "s")
    configs = [trial.config for trial in run.state.trials.values()]
    assert len(configs) == len(set(configs)) == 8
    assert run.spec.objective.is_multi
    assert read_sweep(run.folder).weights == (0.0, 0.25, 0.5, 0.75, 1.0)
    shown = cli.json(["pareto", "s", "--json"])
    assert [row["weight"] for row in shown["weights"]] == [0.0, 0.25, 0.5, 0.75, 1.0]
    scores = {(p["run"], p["trial"]): p for p in shown["points"]}
    assert all(scores[(row["run"], row["trial"])]["on_front"] for row in shown["weights"])
    shares = shown["hypervolume_share_by_trial"]
    assert len(shares) == 8
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


def test_a_kill_while_a_sweep_is_created_leaves_no_run(family, monkeypatch):
    def killed(folder: Path, spec: object) -> None:
        raise KeyboardInterrupt

    command = over(family, "--budget", "6")
    with monkeypatch.context() as patch:
        patch.setattr("cclsearch.run.folder.write_spec", killed)
        assert main(command) == EXIT_INTERRUPTED
    assert (Path("runs") / "s" / "sweep.json").is_file()
    assert main(["status", "s"]) == 2
    assert main(command) == 0
    assert read_sweep(Path("runs") / "s") is not None


def test_a_dry_run_shows_the_joined_space_and_starts_nothing(family, cli):
    shown = cli.out(over(family, "--dry-run"))
    assert "27 valid configurations" in shown
    assert "sampler surrogate" in shown
    assert not Path("runs").exists()


def test_an_objective_on_an_unrecorded_metric_is_refused(family, cli):
    error = cli.err(over(family, "--objective", "energy", command="run"))
    assert "needs energy_j_per_mtoken, but the recording 'toy-8' has no energy_j_per_mtoken" in error
    assert not Path("runs").exists()


def test_the_pareto_front_of_a_sweep_matches_brute_force(family):
    assert main(over(family, "--budget", "27", "--quiet", "--sampler", "random")) == 0
    page = gather_pareto_page([load_run(Path("runs") / "s")])
    # the fastest row at each size: tp 1, micro-batch 2, at 16/N seconds
    assert [(p.values[0], p.values[1]) for p in page.front] == [(1.0, 16.0), (2.0, 8.0), (4.0, 4.0)]
    assert len(page.points) == 24
    baseline = load_run(Path("runs") / "s").state.trials[1].outcome
    t0, n0 = baseline.metrics["step_time_s"], baseline.metrics["num_accelerators"]
    for weight, index, score in page.weights:
        best = max(weight * t0 / p.values[0] + (1 - weight) * n0 / p.values[1] for p in page.points)
        assert score == pytest.approx(best)
        assert page.points[index].on_front


def test_pareto_writes_a_table_a_page_and_charts(family, capsys):
    search(family / "toy-8", "a", budget=6)
    search(family / "toy-16", "b", budget=6)
    assert main(["pareto", "a", "b", "--objective", "composite", "--out", "front"]) == 0
    text = Path("front/pareto.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    assert {row["run"] for row in rows} == {"a", "b"}
    assert {row["provenance"] for row in rows} == {"recorded"}
    page = Path("front/pareto.html").read_text(encoding="utf-8")
    assert "recorded" in page
    assert {path.name for path in Path("front/charts").iterdir()} >= {"weights.png", "hypervolume.png"}
    assert "front (recorded)" in capsys.readouterr().out


def test_pareto_accepts_three_metrics(family, cli):
    search(family / "toy-8", "a", budget=9)
    metrics = "step_time_s,peak_memory_gib,tokens_per_s_per_accelerator"
    assert main(["pareto", "a", "--metrics", metrics, "--out", "front", "--no-png"]) == 0
    shown = json.loads(cli.out(["pareto", "a", "--metrics", metrics, "--json"]).splitlines()[-1])
    assert shown["metrics"] == metrics.split(",")
    assert any(point["on_front"] for point in shown["points"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--metrics", "step_time_s"], "two or three different metrics"),
        (["--metrics", "step_time_s,nonsense"], "there is no metric 'nonsense'"),
        (["--objective", "step_time"], "needs an objective with a parameter 'weight' or with several metrics"),
        (["--objective", "composite", "--weights", "0:2:1"], "weights must be from:to:step"),
        (["--weights", "0:1:0.5"], "run 'a' is not a sweep over weights"),
        (["--objective", "pareto", "--weights", "0:1:0.5"], "'pareto' has several metrics and no parameter 'weight'"),
        (["--metrics", "step_time_s,overlap", "--weights", "0,1"], "--metrics and --weights exclude each other"),
        (["--metrics", "step_time_s,overlap", "--objective", "pareto"], "--metrics and --objective exclude each other"),
        (["--metrics", "step_time_s,hfu"], "hfu has no better direction of its own"),
        (["--metrics", ""], "two or three different metrics"),
        (["b"], "have no common Pareto front: work differs"),
    ],
)
def test_invalid_pareto_options_are_refused(family, cli, args, message):
    search(family / "toy-8", "a", budget=2)
    if args == ["b"]:
        search(family / "other", "b", budget=2)
    assert message in cli.err(["pareto", "a", *args])


def test_trace_metrics_are_optimized_in_their_own_direction():
    terms = make_pareto_objective(["step_time_s", "overlap", "exposed_comm_frac"], "training").terms
    assert [term.direction.value for term in terms] == ["minimize", "maximize", "minimize"]
    # a trace metric with the name of a metric of the run has the same direction
    for name in METRICS.names():
        better = METRICS.get(name).better
        if name in list_metrics():
            assert list_metrics()[name].direction == {"lower": "minimize", "higher": "maximize"}[better]


def test_a_sweep_in_an_allocation_needs_no_recording(project, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert main(["sweep", "--workload", "wl5", "--in-allocation", "--dry-run", "--runs", "elsewhere"]) == 0
    shown = capsys.readouterr().out
    assert "job script of the first (slurm-generic)" in shown
    assert f"--chdir={project / 'elsewhere'}/wl5-" in shown


def test_sweep_gives_the_same_launcher_hint_as_run(project, cli):
    shown = [cli.out([command, "--workload", "wl2", "--dry-run"]) for command in ("sweep", "run")]
    hints = [sorted(line for line in text.splitlines() if "this machine has" in line) for text in shown]
    assert hints[0] == hints[1] != []


def test_weights_need_an_objective_with_a_weight(family, cli):
    error = cli.err(over(family, "--dry-run", "--objective", "pareto", "--weights", "0:1:0.5"))
    assert "has several metrics and no parameter 'weight'" in error


def test_a_nonlinear_weight_is_refused(tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_text(
        "version: 1\nparameters: {weight: {default: 0.5}}\nmetrics:\n"
        "  - {name: step_time_s, direction: minimize, weight: weight * weight, reference: 1}\n"
        "  - {name: num_accelerators, direction: minimize, weight: 1 - weight, reference: 1}\n",
        encoding="utf-8",
    )
    with pytest.raises(UserError, match="linearly"):
        describe_sweep(str(path), (0.0, 1.0), task="training")


def test_a_sweep_ranks_only_trials_that_satisfy_its_constraint(family):
    assert main(over(family, "--budget", "4", "--constraint", "num_accelerators <= 8", "--quiet")) == 0
    run = load_run(Path("runs") / "s")
    assert [str(constraint) for constraint in run.spec.objective.constraints] == ["num_accelerators <= 8 accelerators"]
    ranked = [trial for trial in run.state.trials.values() if trial.loss is not None]
    assert all(trial.outcome.metrics["num_accelerators"] <= 8 for trial in ranked)
