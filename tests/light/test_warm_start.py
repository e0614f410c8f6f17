"""Warm starts: what a search takes over from earlier ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from paths import ROOT
from recorded_runs import search, write_recording
from scripted_launcher import MeasuredLauncher, ran
from scripted_search import open_search, run_session

import cclsearch
from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.cli import main
from cclsearch.core.values import Config, Failure, FailureKind, Provenance, Stage
from cclsearch.loop.session import rebuild_space
from cclsearch.plan.warm_start import take_over
from cclsearch.propose.agent.prompt.earlier_lines import earlier_lines
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.ensemble import fit_ensemble
from cclsearch.propose.bayes.feasibility import weigh_combinations
from cclsearch.propose.warm_start.apply import apply_earlier
from cclsearch.propose.warm_start.knowledge import EarlierKnowledge, EarlierSearch, LearnedPrior
from cclsearch.propose.warm_start.learn import learn_knowledge
from cclsearch.propose.warm_start.transfer import OWN_SHARE, EarlierFit, transfer_prior
from cclsearch.recording.load import load_recording
from cclsearch.run.catalog import list_runs
from cclsearch.run.folder import load_run
from cclsearch.run.spec import SPEC_FILE, RunSpec, write_spec
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.calibration import CalibrationData, Prior
from cclsearch.stats.closed_form import predictor_of
from cclsearch.stats.kernel import Array, Features, KernelShape

AUTO = ["run", "--workload", "tiny", "--learn-from", "auto"]


@pytest.fixture
def toy(project: Path) -> Path:
    return write_recording(project / "recordings" / "toy")


def replay(toy: Path, *more: str) -> list[str]:
    return ["run", "--workload", str(toy / "card.yaml"), "--recording", str(toy), *more]


def measure(project: Path, name: str, **hardware: object) -> Path:
    """Return a measured run of `tiny`; `hardware` replaces fields of its card."""
    folder, session = open_search(
        project, MeasuredLauncher(lambda job: ran(job, 1.0 + job.trial, simulated=False)), budget=2
    )
    run_session(folder, session)
    spec = yaml.safe_load((folder / SPEC_FILE).read_text(encoding="utf-8"))
    spec["card"]["hardware"] |= hardware
    (folder / SPEC_FILE).write_text(yaml.safe_dump(spec), encoding="utf-8")
    return folder.rename(folder.with_name(name))


def test_a_search_can_learn_from_several_runs(toy, project):
    for name in ("a", "b", "c"):
        search(toy, name, budget=2)
    assert main(replay(toy, "--learn-from", "a", "b", "--learn-from", "c", "--budget", "4", "--name", "d")) == 0
    assert [Path(folder).name for folder in load_run(project / "runs" / "d").spec.learn_from] == ["a", "b", "c"]


def test_a_dry_run_shows_the_first_proposal_of_the_search(toy, project, capsys):
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


def test_auto_uses_the_runs_measured_on_the_same_cluster(toy, project, cli):
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


def test_auto_without_a_usable_run_gives_a_note(toy, capsys, cli):
    [note] = [line for line in cli.out([*AUTO, "--dry-run"]).splitlines() if "earlier run" in line]
    assert "no earlier run was measured on cpu" in note
    search(toy, "a", budget=2)
    assert main(replay(toy, "--learn-from", "auto", "--budget", "2", "--name", "b")) == 0
    assert "`--learn-from auto` uses measured runs, but this search is recorded" in capsys.readouterr().out
    assert load_run(Path("runs") / "b").spec.learn_from == ()


REPLAY = ["run", "--workload", "wl2", "--launcher", "replay"]


def test_learn_from_refuses_a_run_of_different_work(project, cli):
    assert main([*REPLAY, "--budget", "3", "--name", "first", "--quiet"]) == 0
    assert main([*REPLAY, "--budget", "2", "--name", "same", "--quiet", "--learn-from", "first"]) == 0
    error = cli.err(["run", "--workload", "tiny", "--name", "unlike", "--learn-from", "first"])
    assert "is not comparable with this search" in error
    for what in ("model", "global batch", "accelerator", "framework", "provenance"):
        assert what in error
    assert error.count("\n") == 1
    assert not (project / "runs" / "unlike").exists()


DRY = ["run", "--workload", "tiny", "--dry-run"]


def fit_of(log_level: float) -> EarlierFit:
    """Ten exact measurements of a metric whose two multipliers are in different rows."""
    which = np.arange(10) % 2
    return EarlierFit(
        lambda rows: lambda theta: np.asarray(theta[..., which[rows]]),
        Features(np.zeros((10, 1)), np.zeros((10, 0), dtype=np.int16), np.zeros((10, 0), dtype=np.int16)),
        CalibrationData.measured(np.arange(10), np.where(which == 0, log_level, 0.0)),
    )


def test_searches_that_agree_move_the_prior_and_narrow_it_but_not_below_what_differs_between_searches():
    prior = Prior(np.zeros(2), np.array([0.5, 0.5]), KernelShape(0.02, 1.5, 0.01, 0.02), noise=0.02, dof=4.0)
    one, several = (transfer_prior(prior, [fit_of(0.6)] * count) for count in (1, 6))
    assert 0.0 < one.mean_P[0] < several.mean_P[0] < 0.6, "shrunk towards the prior, less with more searches"
    assert abs(several.mean_P[1]) < 0.05
    assert several.sd_P[0] < one.sd_P[0] < 0.5
    assert several.sd_P[0] > np.sqrt(OWN_SHARE) * 0.5
    apart = transfer_prior(prior, [fit_of(0.6), fit_of(-0.6)])
    assert abs(apart.mean_P[0]) < 0.05, "searches that contradict each other cancel"


def test_searches_far_from_the_next_have_in_common_how_they_differ_from_it():
    prior = Prior(np.zeros(2), np.array([0.5, 0.5]), KernelShape(0.02, 1.5, 0.01, 0.02), noise=0.02, dof=4.0)

    def learn(*sizes: int) -> Prior:
        return transfer_prior(prior, [replace(fit_of(0.6), num_accelerators=size) for size in sizes], 64)

    above, around, near = learn(*[512] * 6), learn(*[8, 512] * 3), learn(*[64] * 6)
    assert near.sd_P[0] < around.sd_P[0] < above.sd_P[0], "the next lies between searches, or beyond them"
    assert near.mean_P[0] > around.mean_P[0] > above.mean_P[0]
    assert learn(*[512] * 12).mean_P[0] < around.mean_P[0], "however many they are"


def search_named(name: str, layers: int = 0, learn_from: Sequence[str] | None = (), **hardware: object) -> RunSpec:
    """Return the inputs of a finished search that a function measured, of `tiny` with more layers."""
    card = load_card("tiny")
    model = card.model.model_copy(update={"num_layers": card.model.num_layers + layers})
    card = card.model_copy(update={"model": model, "hardware": card.hardware.model_copy(update=hardware)})
    cclsearch.search(card, lambda config: 2.0, budget=2, name=name, learn_from=learn_from, verbose=False)
    return load_run(Path("runs") / name).spec


def measured(name: str, layers: int = 0, **hardware: object) -> RunSpec:
    """The same, as if a run script had measured the trials."""
    spec = search_named(name, layers, None, **hardware).model_copy(update={"provenance": Provenance.MEASURED})
    write_spec(Path("runs") / name, spec)
    return spec


def origins(spec: RunSpec) -> list[str]:
    return [one.run_id for one in spec.earlier.searches] if spec.earlier else []


def take(spec: RunSpec) -> RunSpec:
    """Return the spec with what the other runs of the project leave."""
    return take_over(spec, rebuild_space(spec), [folder for folder in list_runs() if folder.name != spec.run_id])


def test_a_search_starts_from_the_prior_that_runs_of_other_models_on_its_cluster_leave(project):
    measured("first")
    measured("larger-memory", memory_gib=4096.0)
    measured("second", layers=2)
    third = take(measured("third", layers=4))
    assert origins(third) == ["second", "first"], "the newest first"
    [note] = [line for line in third.banner if "earlier search" in line]
    assert "2 earlier searches with cpu on this cluster set the prior of step_time_s: second (tiny, 2 trials)" in note
    assert third.earlier is not None
    assert RunSpec.model_validate_json(third.model_dump_json()).earlier == third.earlier


def test_predictions_learn_from_measured_runs_on_the_machine_unless_told_not_to(project, cli):
    spec = measured("first")
    config = str(load_run(Path("runs") / "first").state.trials[1].config).replace(" ", ",")
    [found] = cli.json(["predict", "-w", "tiny", "--json", "--config", config])["configurations"]
    assert (found["origin"], found["step_time_s"]) == ("measured", pytest.approx(2.0))
    answer = cli.json(["predict", "-w", "tiny", "--set", "seq_len=64", "--json"])
    assert "first (tiny, 2 trials; other seq len)" in str(answer["notes"])
    [alone] = cli.json(["predict", "-w", "tiny", "--json", "--learn-from", "none"])["notes"][-1:]
    assert alone.startswith("not trustworthy here: no measurement on cpu or with cpu is behind")
    assert "measured: step time 2 [" in cli.out(["space", "explain", "-w", "tiny", "--config", config])
    assert cclsearch.predict(spec.card, top=None)["step_time_s"].isin([found["step_time_s"]]).sum() == 2


def test_a_simulated_run_adapts_predictions_but_no_figure_of_it_is_called_measured(project, cli):
    cclsearch.search("tiny", launcher="simulate", budget=2, name="rehearsal", verbose=False)
    config = str(load_run(Path("runs") / "rehearsal").state.trials[1].config).replace(" ", ",")
    answer = cli.json(["predict", "-w", "tiny", "--json", "--config", config, "--learn-from", "rehearsal"])
    assert answer["configurations"][0]["origin"] == "predicted"
    assert "rehearsal (tiny, 2 trials; other provenance (simulated))" in str(answer["notes"])


def test_what_functions_measured_is_taken_over_only_if_the_runs_are_named(project, cli):
    search_named("first")
    assert search_named("other", layers=1).earlier is None
    named = search_named("named", layers=2, learn_from=["first"])
    assert origins(named) == ["first"]
    assert named.learn_from == (), "its times are of other work"
    assert "predictions rest on multipliers learned from first" in cli.out(["show", "named", "1"])
    assert "predictions rest on" not in cli.out(["show", "other", "1"])
    assert main(["report", "named"]) == 0
    page = next((project / "runs" / "named").rglob("*.html")).read_text()
    assert "set the prior of step_time_s: first (tiny, 2 trials)" in page


def test_times_of_the_same_work_do_not_count_twice(project, cli):
    search_named("first")
    again = search_named("again", learn_from=["first"])
    assert "predictions rest on the trials of first" in cli.out(["show", "again", "1"])
    assert "warm start from the trials of first" in again.banner, "status and report show it"
    assert len(again.learn_from) == 1
    assert again.earlier is None


def test_none_excludes_other_runs(project, cli):
    search_named("first")
    assert "earlier search" not in cli.out([*DRY, "--learn-from", "none"])
    assert "give `none` alone" in cli.err([*DRY, "--learn-from", "none", "first"])


def test_a_recorded_search_takes_over_nothing_unless_runs_are_named(project, capsys):
    toy = write_recording(project / "recordings" / "toy")
    search(toy, "a", budget=3)
    capsys.readouterr()
    again = ["run", "--workload", str(toy / "card.yaml"), "--recording", str(toy), "--budget", "2"]
    assert main([*again, "--name", "b", "--quiet"]) == 0
    assert load_run(project / "runs" / "b").spec.earlier is None


def test_a_run_that_cannot_be_read_is_skipped_with_a_line(project):
    measured("good")
    measured("bad", layers=1)
    (project / "runs" / "bad" / SPEC_FILE).write_text("[", encoding="utf-8")
    third = take(measured("third", layers=2))
    assert origins(third) == ["good"]
    assert "1 earlier run cannot be read and teaches nothing: bad" in third.banner


def tiny_space() -> Space:
    configs = [Config(dp=2, micro_batch_size=m) for m in (1, 2, 4)]
    return space_from_rows([Knob("dp", (2,)), Knob("micro_batch_size", (1, 2, 4))], configs)


def test_multipliers_learned_from_one_model_predict_another_and_are_the_same_each_time():
    card, space = load_card("tiny"), tiny_space()
    seen = observe_tiny([math.log(3.0)] * 3)
    larger = card.model_copy(update={"model": card.model.model_copy(update={"num_layers": 2 * card.model.num_layers})})
    knowledge = learn_knowledge(larger, predictor_of(larger, space), [(card, seen)])
    assert knowledge == learn_knowledge(larger, predictor_of(larger, space), [(card, seen)])
    assert "peak_memory_gib" not in knowledge.priors, "no trial measured a peak"
    assert knowledge.odds == {"step_time_s": 0.0}, "one search does not show whether searches are alike"
    before = predictor_of(larger, space).forms["step_time_s"].predict(len(space))[0]
    learned = apply_earlier(predictor_of(larger, space), space, knowledge)
    after = learned.forms["step_time_s"].predict(len(space))[0]
    assert np.all(after - before > 0.2), "a framework that was three times slower is expected to be slower again"
    assert np.all(after - before < np.log(3.0))
    assert apply_earlier(predictor_of(larger, space), space, knowledge) is learned


def observe_tiny(log_factor_N: Sequence[float], card: Card | None = None) -> list[Observation]:
    """Return a trial of every configuration, each slower than predicted by these log factors."""
    space = tiny_space()
    form = predictor_of(card or load_card("tiny"), space).forms["step_time_s"]
    times = np.exp(form.predict(len(space))[0] + np.array(log_factor_N)).tolist()
    return [Observation(n + 1, space.config(n), n, t, metrics={"step_time_s": t}) for n, t in enumerate(times)]


def on_ranks(count: int) -> Card:
    card = load_card("tiny")
    return card.model_copy(update={"hardware": card.hardware.model_copy(update={"num_accelerators": count})})


def expect_tiny(
    card: Card, searches: Sequence[tuple[Card, Sequence[Observation]]], *, with_residuals: bool = True
) -> Array:
    """Return the log times that the next search expects, beyond what its closed form says."""
    space = tiny_space()
    before = predictor_of(card, space)
    knowledge = learn_knowledge(card, before, searches)
    if not with_residuals:
        knowledge = knowledge.model_copy(update={"residuals": {}})
    stored = EarlierKnowledge.model_validate_json(knowledge.model_dump_json())
    form = apply_earlier(before, space, stored).forms["step_time_s"]
    fitted = fit_ensemble(form, apply_earlier(before, space, stored).features, (), ())
    return fitted.mean(np.arange(len(space))) - before.forms["step_time_s"].predict(len(space))[0]


def test_a_knob_value_that_was_slow_in_earlier_searches_is_expected_to_be_slow_in_the_next():
    searches = [(load_card("tiny"), observe_tiny([0.0, 0.4, 0.0]))] * 3
    off = expect_tiny(load_card("tiny"), searches)
    assert 0.02 < off[1] - max(off[0], off[2]) < 0.4
    multipliers_alone = expect_tiny(load_card("tiny"), searches, with_residuals=False)
    assert np.ptp(multipliers_alone) < 0.5 * np.ptp(off), "no multiplier makes the middle value alone slow"


def test_a_search_on_about_as_many_accelerators_teaches_more():
    seen = observe_tiny([0.0, 0.4, 0.0])
    near, far = (expect_tiny(on_ranks(2), [(on_ranks(count), seen)] * 3) for count in (2, 256))
    assert near[1] - near[0] > 1.3 * (far[1] - far[0]) > 0


def test_residuals_are_left_out_if_a_fixed_knob_has_another_value():
    space = space_from_rows([Knob("dp", (4,)), Knob("micro_batch_size", (1, 2, 4))],
                            [Config(dp=4, micro_batch_size=m) for m in (1, 2, 4)])  # fmt: skip
    before = predictor_of(load_card("tiny"), space)
    knowledge = learn_knowledge(load_card("tiny"), before, [(load_card("tiny"), observe_tiny([0.0, 0.4, 0.0]))])
    assert knowledge.residuals["step_time_s"]
    assert apply_earlier(before, space, knowledge).forms["step_time_s"].prior.known is None


def test_what_fitted_in_an_earlier_search_says_whether_optimizer_states_are_sharded():
    recording = load_recording(ROOT / "benchmarks" / "landscapes" / "vtrain-h1024-l12-g8-b16")
    small = recording.card.hardware.model_copy(update={"memory_gib": 2.7})
    card = recording.card.model_copy(update={"hardware": small})
    predictor = predictor_of(card, recording.space)
    memory = predictor.memory
    sharded = memory.form.prior.mean_P.copy()
    sharded[memory.form.multipliers.index("unsharded")] = -5.0
    fits = memory.form.log_cost(np.arange(len(recording.space)))(sharded) < memory.log_limit
    failure = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")
    seen = [
        Observation(n + 1, recording.space.config(n), n, 1.0 if ok else None, failure=None if ok else failure)
        for n, ok in enumerate(fits.tolist())
    ]
    assert 3 < fits.sum() < len(fits), "the limit of memory divides the table"
    knowledge = learn_knowledge(card, predictor, [(card, seen)])
    before = {frozenset(ways): np.exp(log_prior) for ways, (log_prior, _) in weigh_combinations(predictor, ()).items()}

    def is_sharded(ways: Iterable[tuple[str, float]]) -> bool:
        return dict(ways)["unsharded"] == -5.0

    after = sum(one.probability for one in knowledge.ways if is_sharded(one.log_multipliers.items()))
    assert sum(one.probability for one in knowledge.ways) == pytest.approx(1.0, abs=1e-3)
    assert after > sum(probability for ways, probability in before.items() if is_sharded(ways)) + 0.05


def test_searches_that_agree_make_their_prior_likely_and_ones_that_disagree_do_not():
    card = load_card("tiny")

    def odds(*factors: float) -> float:
        searches = [(card, observe_tiny([math.log(factor)] * 3)) for factor in factors]
        return learn_knowledge(card, predictor_of(card, tiny_space()), searches).odds["step_time_s"]

    assert odds(3.0) == 0.0
    assert 0.0 < odds(3.0, 3.0) < odds(3.0, 3.0, 3.0, 3.0, 3.0)
    assert odds(0.2, 5.0) < 0.0


def test_trials_that_contradict_earlier_searches_lead_back_to_the_prior_without_them():
    predictor, space = predictor_of(load_card("tiny"), tiny_space()), tiny_space()
    form = predictor.forms["step_time_s"]
    wrong = EarlierKnowledge(priors={"step_time_s": {"scale": LearnedPrior(mean=2.0, sd=0.1)}})
    learned = apply_earlier(predictor, space, wrong).forms["step_time_s"]
    assert learned.odds == math.log(4.0), "of searches that were planned before odds were learned"

    def weigh(log_factor_N: Array) -> float:
        """Return the weight of the hypotheses that start from what earlier searches leave."""
        fitted = fit_ensemble(learned, predictor.features, observe_tiny(log_factor_N), ())
        from_them = [h.prior.mean_P[0] == 2.0 for h in fitted.hypotheses]
        return float(fitted.weight_h[from_them].sum())

    assert weigh(np.zeros(3)) < 0.2
    assert weigh(learned.predict(len(space))[0] - form.predict(len(space))[0]) > 0.8


def test_an_unknown_multiplier_in_frozen_knowledge_changes_nothing():
    space = tiny_space()
    predictor = predictor_of(load_card("tiny"), space)
    knowledge = EarlierKnowledge(priors={"step_time_s": {"gone": LearnedPrior(mean=9.0, sd=0.1)}})
    applied = apply_earlier(predictor, space, knowledge)
    assert np.array_equal(applied.forms["step_time_s"].prior.mean_P, predictor.forms["step_time_s"].prior.mean_P)


def test_the_llm_reads_earlier_insights_with_their_origin_as_quoted_data():
    wrote = EarlierSearch(
        run_id="llama-1",
        workload="llama",
        trials=9,
        insights=('TP across nodes is slow" [end',),
        beliefs={"dp": "slower", "zero_stage=0": "much_more"},
    )
    view = SearchView(
        load_card("tiny"), tiny_space(), (), frozenset(), 5, 0, earlier=EarlierKnowledge(searches=(wrote,))
    )
    first, second = earlier_lines(view, anonymous=False)
    assert first.startswith('llama-1 (work "llama"): "TP across nodes')
    assert first.count('"') == 4, "the insight cannot close its quotation"
    assert "dp: slower; zero_stage=0: much more" in second
    assert not any("llama" in line for line in earlier_lines(view, anonymous=True))


def test_none_beside_a_run_is_one_line(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "give `none` alone" in cli.err(["predict", "-w", "wl2", "--learn-from", "none", "x"])
