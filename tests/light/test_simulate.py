"""The `simulate` launcher: a search without a cluster, whose figures are marked as simulated wherever they appear."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from report_pages import unpack_charts

from cclsearch.card.load import load_card
from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.values import Provenance
from cclsearch.launch.profile import load_profile, make_launcher
from cclsearch.loop.session import rebuild_space
from cclsearch.propose.base import SearchView
from cclsearch.run.folder import load_run
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import predict_space
from cclsearch.stats.simulated import ACCIDENTS, SimulatedCluster, SimulatedSettings

NO_FAILURES = SimulatedSettings(crashes=0.0, infrastructure_failures=0.0)
RUN = ("run", "--workload", "wl5", "--launcher", "simulate", "--budget", "4")


def space_of(name: str) -> Space:
    card = load_card(name)
    return build_space(card, load_framework(card.framework))


def simulate(name: str, settings: SimulatedSettings = NO_FAILURES) -> SimulatedCluster:
    return SimulatedCluster.of(settings, load_card(name), space_of(name))


def find_best(cluster: SimulatedCluster) -> int:
    rows = np.arange(len(cluster.space))
    return int(np.argmin(np.where(cluster.succeeds(rows), cluster.values("step_time_s", rows), np.inf)))


def write_profile(project: Path, name: str, text: str) -> None:
    (project / "launchers").mkdir(exist_ok=True)
    (project / "launchers" / f"{name}.yaml").write_text(f"launcher: simulate\n{text}")


def test_the_same_seed_gives_the_same_cluster_and_another_seed_another():
    one, again = simulate("wl5"), simulate("wl5")
    rows = np.arange(len(one.space))
    assert np.array_equal(one.values("step_time_s", rows), again.values("step_time_s", rows))
    assert one.run(3, 1) == again.run(3, 1)
    assert one.run(3, 1) != one.run(3, 2), "noise is of the attempt"
    other = simulate("wl5", NO_FAILURES.model_copy(update={"seed": 1}))
    assert not np.allclose(one.values("step_time_s", rows), other.values("step_time_s", rows))


def test_without_surprises_the_cluster_is_what_the_closed_form_predicts():
    plain = SimulatedSettings(surprise_parts=0, surprise_values=0, noise=0)
    cluster = simulate("wl5", plain)
    prediction = predict_space(cluster.card, cluster.space)
    rows = np.arange(len(cluster.space))
    assert np.allclose(cluster.values("step_time_s", rows), prediction.value_N)


def test_surprises_change_which_configuration_is_best():
    plain = find_best(simulate("wl5", SimulatedSettings(surprise_parts=0, surprise_values=0)))
    seeds = (NO_FAILURES.model_copy(update={"seed": seed}) for seed in range(6))
    assert sum(find_best(simulate("wl5", settings)) != plain for settings in seeds) >= 4


def test_knobs_without_effect_have_no_surprise():
    """Sharding over one replica is the same run whatever the stage."""
    cluster = simulate("wl5")
    columns = {knob.name: cluster.space.column(knob.name) for knob in cluster.space.knobs}
    idle = np.flatnonzero(columns["dp"] == 1)
    others = [name for name in columns if name != "zero_stage"]
    groups: dict[tuple[object, ...], set[float]] = {}
    for row, value in zip(idle, cluster.values("step_time_s", idle), strict=True):
        groups.setdefault(tuple(columns[name][row] for name in others), set()).add(round(float(value), 12))
    assert groups
    assert all(len(values) == 1 for values in groups.values())


def test_failures_are_drawn_from_the_seed():
    cluster = simulate("wl5", SimulatedSettings(crashes=0.3, infrastructure_failures=0.3))
    trials = [cluster.run(row, 1) for row in range(len(cluster.space))]
    shares = [np.mean([bool(getattr(trial, kind)) for trial in trials]) for kind in ("accident", "crashed")]
    assert all(0.1 < share < 0.45 for share in shares)
    assert {trial.accident for trial in trials} == {*ACCIDENTS, None}
    failed = next(row for row, trial in enumerate(trials) if trial.accident)
    assert any(cluster.run(failed, attempt).accident is None for attempt in range(2, 12)), "a retry may succeed"


def test_a_configuration_that_needs_more_memory_than_predicted_fails():
    tight = load_card("wl5", sets=["memory_gb=12"])
    space = build_space(tight, load_framework(tight.framework))
    many = [SimulatedCluster.of(SimulatedSettings(seed=n, surprise_memory=0.5), tight, space) for n in range(3)]
    fitting = [np.sum(np.log(cluster.memory_gib(np.arange(len(space)))) <= np.log(0.95 * 12)) for cluster in many]
    assert len(set(fitting)) == 3, "which configurations fit differs between clusters"


def test_a_search_is_simulated_end_to_end_and_every_output_says_so(project, cli):
    assert "(simulated)" in cli.out([*RUN, "--name", "sim"])
    run = load_run(project / "runs" / "sim")
    assert run.spec.provenance is Provenance.SIMULATED
    assert {t.outcome.provenance for t in run.state.trials.values() if t.outcome} == {Provenance.SIMULATED}
    best = run.state.best
    assert best.outcome.admission.admitted
    assert {"step_time_s", "tokens_per_s", "peak_memory_gib"} <= set(best.outcome.metrics)
    result = json.loads((project / "runs" / "sim" / "trials" / f"{best.number:04d}" / "result.json").read_text())
    assert result["simulated"] is True
    assert result["recorded"] is False
    assert main(["export", "sim", "--to", "csv", "--out", "sim.csv"]) == 0
    assert main(["export", "sim", "--to", "ccl-bench", "--out", "cards"]) == 0
    assert main(["report", "sim", "--no-png", "--out", "sim.html"]) == 0
    rows = (project / "sim.csv").read_text().splitlines()
    assert len(rows) == 1 + len(run.state.trials)
    assert all(row.split(",")[2] == "simulated" for row in rows[1:])
    cards = [yaml.safe_load(path.read_text()) for path in (project / "cards").glob("*/*.yaml")]
    assert len(cards) == len(rows) - 1
    assert all("(simulated: nothing was run here)" in card["description"] for card in cards)
    page = (project / "sim.html").read_text()
    assert "<figcaption>Step time (simulated) by trial</figcaption>" in page
    assert "seconds per step (simulated)" in unpack_charts(page), "the charts' axes"
    for command in (
        ["status"],
        ["status", "sim"],
        ["best", "sim"],
        ["show", "sim", str(best.number)],
        ["admit", "sim"],
    ):
        assert "simulated" in cli.out(command), command


def test_a_card_without_a_cluster_or_recording_is_simulated_by_default(project, cli):
    assert "so trials are simulated" in cli.out(["run", "--workload", "wl5", "--budget", "1", "--name", "r"])
    assert main(["sweep", "--workload", "wl5", "--budget", "2", "--name", "s"]) == 0
    assert load_run(project / "runs" / "s").spec.provenance is Provenance.SIMULATED


def test_a_night_simulates_only_if_it_is_asked_to(project, cli):
    night = project / "nightly.yaml"
    night.write_text("jobs:\n- {workload: wl5, budget: {trials: 1}}\n")
    assert "launcher: simulate" in cli.err(["nightly", str(night), "--once"])
    night.write_text("jobs:\n- {workload: wl5, launcher: simulate, budget: {trials: 1}}\n")
    assert main(["nightly", str(night), "--once"]) == 0


def test_a_resumed_simulated_search_continues_on_the_same_cluster(project):
    """Every trial, before and after, is what the cluster gives for its configuration and attempt."""
    write_profile(project, "shaky", "infrastructure_failures: 0.3\ncrashes: 0.2\n")
    search = ["run", "--workload", "wl5", "--launcher", "shaky", "--budget", "4", "--sampler", "random", "--quiet"]
    assert main([*search, "--name", "cut"]) == 0
    assert main(["resume", "cut", "--budget", "12", "--quiet"]) == 0
    run = load_run(project / "runs" / "cut")
    assert run.state.num_spent == 12
    settings = run.spec.profile.read_settings(SimulatedSettings)
    cluster = SimulatedCluster.of(settings, run.spec.card, rebuild_space(run.spec))
    for trial in run.state.trials.values():
        row, outcome = cluster.space.row(trial.config), trial.outcome
        assert all(cluster.run(row, attempt).accident for attempt in range(1, trial.attempt))
        given = cluster.run(row, trial.attempt)
        assert outcome.metrics.get("step_time_s") == given.metrics.get("step_time_s")
        assert (outcome.failure is None) == bool(given.metrics)


def test_figures_of_two_clusters_are_not_mixed(project, cli):
    write_profile(project, "other", "seed: 5\n")
    assert main([*RUN, "--name", "one"]) == 0
    assert main([*RUN[:4], "other", *RUN[5:], "--name", "two"]) == 0
    assert "different simulated cluster" in cli.err([*RUN, "--learn-from", "two", "--name", "three"])
    assert "simulated cluster differs" in cli.err(["pareto", "one", "two"])
    assert main([*RUN, "--learn-from", "one", "--name", "four"]) == 0


def test_the_proposer_sees_nothing_of_the_cluster():
    """A view has no profile: only the card, the space and the trials."""
    known = set(SearchView.__dataclass_fields__)
    assert not known & {"profile", "spec", "settings", "launcher", "cluster"}


def test_what_no_simulated_trial_has_is_refused(project, cli):
    assert "simulated trials have only" in cli.err([*RUN, "-o", "energy"])


@pytest.mark.parametrize(
    ("text", "field"),
    [("seed: -1\n", "seed"), ("noise: .nan\n", "noise"), ("crashes: true\n", "crashes"), ("sede: 1\n", "sede")],
)
def test_a_wrong_field_of_a_profile_is_named(project, text, field):
    write_profile(project, "wrong", text)
    with pytest.raises(UserError, match=field):
        make_launcher(load_profile("wrong"))


def test_launcher_check_says_what_is_simulated(project, cli):
    shown = cli.out(["launcher", "check", "simulate"])
    assert "nothing runs" in shown
    assert "seed 0" in shown
    assert "no figure is measured" in shown


def test_a_cluster_with_a_network_of_its_own_is_searched_like_any_other(tmp_path):
    thin = SimulatedSettings(cluster="switch:4:2400:2.5/fat-tree:4:200:8:leaf=8:over=8", crashes=0.0)
    wide = SimulatedSettings(cluster="switch:16:2400:2.5", crashes=0.0)
    rows = np.arange(len(space_of("wl5")))
    times = {name: simulate("wl5", each).values("step_time_s", rows) for name, each in (("thin", thin), ("wide", wide))}
    assert np.max(times["thin"] / times["wide"]) > 1.5
    assert thin.describe() != wide.describe() != SimulatedSettings().describe()
    with pytest.raises(UserError, match="has 8 ranks, but wl5 needs 16"):
        simulate("wl5", SimulatedSettings(cluster="switch:8:2400:2.5"))
    with pytest.raises(UserError, match="KIND:SIZE:GBPS:US"):
        SimulatedSettings(cluster="switch:8")


def test_the_launcher_searches_on_the_network_of_its_profile(tmp_path, monkeypatch, capsys, cli):
    monkeypatch.chdir(tmp_path)
    write_profile(tmp_path, "thin", "cluster: switch:4:2400:2.5/rail:4:200:8:leaf=2:over=4\n")
    assert main(["run", "--workload", "wl5", "--launcher", "thin", "--budget", "3", "--name", "on-thin"]) == 0
    assert "simulated" in capsys.readouterr().out
    write_profile(tmp_path, "bad", "cluster: switch:4\n")
    assert "KIND:SIZE:GBPS:US" in cli.err(["run", "--workload", "wl5", "--launcher", "bad", "--budget", "3"])
