"""Constraints of an objective, and the closest configuration if none meets them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import optuna
import pytest
from paths import ROOT

from cclsearch.cli import main
from cclsearch.core.metrics import Direction, MetricInfo
from cclsearch.loop.bench import RecordedTable, replay_search
from cclsearch.nightly.compare import describe_unranked
from cclsearch.nightly.history import read_night
from cclsearch.plugins import TASKS
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.acquisition import has_nothing_feasible
from cclsearch.propose.bayes.constraints import log_excess
from cclsearch.propose.bayes.hypervolume import propose_pareto
from cclsearch.propose.bayes.pareto_proposer import ParetoProposer
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.propose.bayes.snapshot import summarize_posterior
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.propose.study.choose import make_sampler
from cclsearch.propose.study.parameters import search_space_distributions
from cclsearch.propose.study.samplers import SurrogateSampler
from cclsearch.recording.load import load_recording
from cclsearch.recording.table import RowStatus
from cclsearch.run.closest import find_closest
from cclsearch.run.folder import load_run
from cclsearch.scoring.objective import Constraint, Objective, single_metric
from cclsearch.stats.calibration import Prior
from cclsearch.stats.closed_form import ClosedForm, Predictor
from cclsearch.stats.kernel import KernelShape, read_features

RECORDING = load_recording(ROOT / "benchmarks" / "landscapes" / "nanotron-8b-4n")
STEP_TIME = single_metric(RECORDING.primary)
PEAKS = np.array([row.metrics.get("peak_memory_gib", np.nan) for row in RECORDING.rows])
LOWEST = float(np.nanmin(PEAKS))


def limit(metric: str, at_most: float | None = None, at_least: float | None = None) -> Objective:
    """Return the step time with one constraint."""
    return STEP_TIME.model_copy(
        update={"constraints": (Constraint(metric=metric, at_most=at_most, at_least=at_least),)}
    )


def search(objective: Objective, trials: int, name: str = "default", seed: int = 0) -> list[Observation]:
    """Return the trials of a search on the recording."""
    table, proposer = RecordedTable(RECORDING, objective), make_sampler(name)
    seen: list[Observation] = []
    for trial in range(trials):
        proposals = proposer.propose(view_of(objective, seen, trials - trial, seed), 1)
        if not proposals:
            break
        config = proposals[0].config
        seen.append(table.ask(trial, RECORDING.space.row(config), config))
    return seen


def view_of(objective: Objective, seen: Sequence[Observation], budget_left: int = 5, seed: int = 0) -> SearchView:
    return SearchView(RECORDING.card, RECORDING.space, tuple(seen), frozenset(), budget_left, seed, target=objective)


def posterior_of(objective: Objective, seen: Sequence[Observation] = ()) -> CandidatePosterior:
    posterior = fit_posterior(view_of(objective, seen))
    assert posterior is not None
    return posterior


def test_a_memory_constraint_is_respected_from_the_closed_form_on():
    third = float(np.nanquantile(PEAKS, 1 / 3))
    found = replay_search(
        RECORDING, make_sampler("default"), seed=0, budget=10, objective=limit("peak_memory_gib", third)
    )
    assert found.best_over_optimum[-1] <= 1.05
    free = search(STEP_TIME, 10)
    held = search(limit("peak_memory_gib", third), 10)
    counts = [sum(o.metrics.get("peak_memory_gib", 0.0) > third for o in seen) for seen in (free, held)]
    assert counts[1] < counts[0], "fewer trials exceed the limit than without a constraint"


def test_a_trial_that_violates_a_constraint_teaches_the_models_and_is_no_failure():
    seen = search(limit("peak_memory_gib", 0.9 * LOWEST), 3)
    assert all(o.violation > 0 and o.loss is None for o in seen if o.failure is None)
    measured = [o for o in seen if o.failure is None]
    posterior = posterior_of(limit("peak_memory_gib", 0.9 * LOWEST), seen)
    assert len(posterior.models.primary.most_likely.rows_n) == len(measured) > 0
    valid = [replace(o, loss=o.metrics["step_time_s"], violation=0.0) for o in measured]
    failures = [o for o in seen if o.failure is not None]
    free = posterior_of(STEP_TIME, [*valid, *failures])
    assert sorted(posterior.p_success_m) == pytest.approx(sorted(free.p_success_m))


def test_a_constraint_that_nothing_can_meet_ends_with_the_closest_configuration():
    objective = limit("peak_memory_gib", 0.5 * LOWEST)
    seen = search(objective, 12)
    assert len(seen) == 12, "the search does not end early"
    ran = [o.metrics["peak_memory_gib"] for o in seen if o.failure is None]
    assert min(ran) <= 1.02 * LOWEST
    posterior = posterior_of(objective, seen)
    assert not has_nothing_feasible(posterior)
    assert len(summarize_posterior(view_of(objective, seen), posterior, 3).top_rows) == 3


def test_a_bound_on_accelerators_and_on_derived_metrics_is_exact():
    assert set(RECORDING.space.num_accelerators_N.tolist()) == {32}
    assert posterior_of(limit("num_accelerators", at_most=32)).p_satisfies_m == pytest.approx(1.0)
    assert posterior_of(limit("num_accelerators", at_most=31)).p_satisfies_m == pytest.approx(0.0)
    median_s = float(np.median(posterior_of(STEP_TIME).value_m))
    per_step = RECORDING.card.number("global_batch_size") * RECORDING.card.number("seq_len")
    by_rate = posterior_of(limit("tokens_per_s", at_least=per_step / median_s)).p_satisfies_m
    by_time = posterior_of(limit("step_time_s", at_most=median_s)).p_satisfies_m
    assert by_rate == pytest.approx(by_time, abs=1e-4)
    assert 0.2 < float(np.mean(by_time)) < 0.8


def test_a_metric_without_a_closed_form_is_learned_from_the_trials():
    objective = limit("heat", at_most=50.0)
    heat = {row: 10.0 * float(RECORDING.space.config(row)["tp"]) for row in range(len(RECORDING.space))}
    seen = []
    for trial, row in enumerate([n for n, row in enumerate(RECORDING.rows) if row.status is RowStatus.OK][::6]):
        metrics = {**RECORDING.rows[row].metrics, "heat": heat[row]}
        excess = objective.violation(metrics)
        loss = None if excess else metrics["step_time_s"]
        seen.append(Observation(trial, RECORDING.rows[row].config, row, loss, metrics=metrics, violation=excess))
    assert any(o.violation for o in seen)
    assert posterior_of(objective).p_satisfies_m == pytest.approx(1.0), "unknown before the first measurement"
    hot = np.array([heat[int(row)] > 50 for row in posterior_of(objective, seen).rows_m])
    p_cool = posterior_of(objective, seen).p_satisfies_m
    assert p_cool[hot].mean() + 0.4 < p_cool[~hot].mean()


@pytest.mark.parametrize("metrics", [(("step_time_s", "minimize"), ("tokens_per_s", "maximize")), None])
def test_the_pareto_strategies_respect_constraints(metrics):
    third = float(np.nanquantile(PEAKS, 1 / 3))
    picked = {}
    for objective in (STEP_TIME, limit("peak_memory_gib", third)):
        view = view_of(objective, search(objective, 4))
        proposals = propose_pareto(view, 6, metrics) if metrics else ParetoProposer().propose(view, 6)
        rows = [RECORDING.space.row(proposal.config) for proposal in proposals]
        picked[bool(objective.constraints)] = float(np.nanmean([PEAKS[row] for row in rows if row is not None]))
    assert picked[True] < picked[False]


def throughput(scale: float) -> Objective:
    metric = TASKS.get("training").metric("tokens_per_s")
    objective = single_metric(metric)
    return objective.model_copy(
        update={"name": "mine", "terms": (objective.terms[0].model_copy(update={"scale": scale}),)}
    )


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_throughput_at_fixed_work_is_searched_exactly_as_the_step_time(scale):
    objective = throughput(scale)
    per_step = RECORDING.card.number("global_batch_size") * RECORDING.card.number("seq_len")
    by_time: list[Observation] = search(STEP_TIME, 8)
    for count in range(9):
        seen = []
        for o in by_time[:count]:
            rate = {} if o.loss is None else {"tokens_per_s": per_step / o.loss}
            loss = None if o.loss is None else 1 / (scale * rate["tokens_per_s"])
            seen.append(replace(o, loss=loss, metrics={**o.metrics, **rate}))
        expected, found = (
            make_sampler("default").propose(view, 3)
            for view in (view_of(STEP_TIME, by_time[:count]), view_of(objective, seen))
        )
        assert [p.config for p in found] == [p.config for p in expected]
        assert [p.rationale for p in found] == [p.rationale for p in expected]


def test_the_excess_grows_with_the_distance_and_is_0_inside_the_bounds():
    constraint = Constraint(metric="m", at_least=2.0, at_most=4.0)
    values = np.array([1.0, 2.0, 3.0, 4.0, 6.0])
    assert np.expm1(log_excess(constraint, values)) == pytest.approx([constraint.excess(v) for v in values], abs=1e-5)


GOODPUT = MetricInfo(name="goodput", unit="1/s", direction=Direction.MAXIMIZE, source="result", is_positive=True)


def test_a_form_of_a_metric_where_greater_is_better_is_modelled_as_its_reciprocal():
    codes = RECORDING.space.codes_NK.astype(float)
    cost_N = np.log1p(np.abs(codes - codes[40]).sum(axis=1))
    prior = Prior(np.zeros(1), np.ones(1), KernelShape(0.1, 1.5, 0.0, 0.0), noise=0.03, dof=4.0)
    form = ClosedForm(GOODPUT, ("level",), prior, lambda rows: lambda theta: theta[..., :1] + cost_N[rows])
    predictor = Predictor(read_features(RECORDING.space), forms={"goodput": form})
    trial = Observation(0, RECORDING.space.config(7), 7, 0.5, metrics={"goodput": 2.0, "step_time_s": 1.0})
    posterior = fit_posterior(view_of(single_metric(GOODPUT), [trial]), predictor)
    assert posterior.best == pytest.approx(np.log(0.5))
    assert int(posterior.rows_m[int(np.argmin(posterior.mean_m))]) == 40
    assert posterior.mean_m.min() == pytest.approx(np.log(0.5) - cost_N[7], abs=0.2)


def test_a_task_that_predicts_nothing_is_searched_by_what_the_trials_teach():
    blind = DefaultProposer(lambda card, space: Predictor(read_features(space)))
    ends = [
        [replay_search(RECORDING, proposer, seed=seed, budget=20).best_over_optimum[-1] for seed in range(4)]
        for proposer in (blind, make_sampler("random"))
    ]
    assert np.mean(ends[0]) < np.mean(ends[1])
    assert max(ends[0]) <= 1.2


def test_nothing_is_expected_of_a_metric_that_no_form_predicts_and_no_trial_measured():
    blind = DefaultProposer(lambda card, space: Predictor(read_features(space)))
    first = blind.propose(view_of(STEP_TIME, []), 1)[0]
    assert (first.expects.metrics, first.rationale.startswith("success probability")) == ({}, True)
    seen = RecordedTable(RECORDING, STEP_TIME).ask(1, RECORDING.best_row, RECORDING.space.config(RECORDING.best_row))
    second = blind.propose(view_of(STEP_TIME, [seen]), 1)[0]
    assert second.expects.metrics["step_time_s"] > 0
    assert "expected step time" in second.rationale


def test_an_optuna_study_takes_an_objective_with_constraints():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    third = float(np.nanquantile(PEAKS, 1 / 3))
    rate = throughput(1.0).model_copy(update={"constraints": limit("peak_memory_gib", third).constraints})
    sampler = SurrogateSampler(RECORDING.card, RECORDING.space, objective=rate)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    ran = []
    for _ in range(8):
        trial = study.ask(search_space_distributions(RECORDING.space))
        found = RECORDING.look_up(trial.params)
        if found.status is not RowStatus.OK:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        trial.set_user_attr("peak_memory_gib", found.metrics["peak_memory_gib"])
        study.tell(trial, 1e6 / found.metrics["step_time_s"])
        ran.append(found)
    allowed = [row.metrics["step_time_s"] for row in ran if row.metrics["peak_memory_gib"] <= third]
    rows = [row.metrics for row in RECORDING.rows if row.metrics.get("peak_memory_gib", 99) <= third]
    assert min(allowed) <= 1.1 * min(metrics["step_time_s"] for metrics in rows)


@pytest.mark.parametrize("bound", [LOWEST / 20, LOWEST / 4, LOWEST * 0.9])
def test_a_bound_far_below_everything_does_not_make_failures_attractive(bound):
    seen = search(limit("peak_memory_gib", at_most=bound), 8)
    peaks = [o.metrics["peak_memory_gib"] for o in seen if o.violation > 0]
    assert len(peaks) >= 6, "most trials run"
    assert min(peaks) <= 1.1 * LOWEST


RECORDED_2N = ROOT / "benchmarks" / "landscapes" / "nanotron-8b-2n"


def search_with(*options: str, constraints: tuple[str, ...], name: str = "r") -> int:
    given = [word for text in constraints for word in ("--constraint", text)]
    arguments = ["run", "-w", "wl2", "--recording", str(RECORDED_2N), "--budget", "6", "--name", name]
    return main([*arguments, *given, *options])


def test_the_closest_configuration_takes_the_place_of_the_best(project, capsys, cli):
    search_with("--quiet", constraints=("peak_memory_gib <= 10",))
    run = load_run(project / "runs" / "r")
    assert [str(constraint) for constraint in run.spec.objective.constraints] == ["peak_memory_gib <= 10 GiB"]
    memory = {t.number: t.outcome.metrics["peak_memory_gib"] for t in run.state.trials.values() if t.outcome}
    least = min(memory.values())
    number = next(n for n, used in memory.items() if used == least)
    text = (
        f"no configuration tried satisfies peak_memory_gib <= 10 GiB; closest: trial {number} with {least:.4g} GiB,"
        f" {least / 10 - 1:.0%} over"
    )
    assert text in capsys.readouterr().out
    best = cli.json(["best", "r", "--json"], 1)
    assert (best["trial"], best["closest"]["trial"], best["closest"]["text"]) == (None, number, text)
    assert best["closest"]["violation"] == pytest.approx(least / 10 - 1)
    assert best["closest"]["peak_memory_gib"] == least
    assert describe_unranked(read_night(run)).endswith(text)
    assert main(["report", "r"]) == 0
    pages = list((project / "runs" / "r").rglob("*.html"))
    assert any("no configuration tried satisfies" in page.read_text(encoding="utf-8") for page in pages)


def test_the_summary_event_names_the_closest_only_without_a_best(project, capsys):
    for name, limit, is_met in (("tight", "10", False), ("loose", "79", True)):
        search_with("--json", constraints=(f"peak_memory_gib <= {limit}",), name=name)
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        summary = next(event for event in events if event["event"] == "summary")
        assert ("closest" in summary, summary["best"] is not None) == (not is_met, is_met)


def test_of_several_constraints_only_the_violated_ones_count(project):
    wanted = ("peak_memory_gib <= 79", "tokens_per_s >= 1e6", "mfu >= 0.9")
    search_with("--quiet", constraints=wanted)
    run = load_run(project / "runs" / "r")
    found = find_closest(run.spec.objective, run.state)
    misses = found.text.partition("; closest: ")[2]
    assert "peak_memory_gib" not in misses
    assert misses.count("under") == 2
    assert f"mfu {found.trial.outcome.metrics['mfu']:.4g} fraction, " in misses
    others = [t.outcome.violation for t in run.state.trials.values() if t.outcome.violation]
    assert found.violation == min(others)
