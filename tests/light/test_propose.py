"""Proposals of the surrogate and its candidates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from paths import ROOT

from cclsearch.card.load import load_card
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import Direction, MetricInfo
from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes import candidates, ensemble, feasibility
from cclsearch.propose.bayes.acquisition import failure_penalty
from cclsearch.propose.bayes.candidates import MAX_OBSERVATIONS, select_window
from cclsearch.propose.bayes.hypervolume import propose_pareto
from cclsearch.propose.bayes.proposer import DefaultProposer
from cclsearch.propose.bayes.snapshot import SearchSnapshot, summarize_posterior
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.propose.study.choose import make_sampler
from cclsearch.propose.study.parameters import search_space_distributions
from cclsearch.propose.study.samplers import SurrogateSampler
from cclsearch.recording.load import Recording, load_recording
from cclsearch.scoring.objective import single_metric
from cclsearch.space.table import Knob, RowSet, Space, space_from_rows

LANDSCAPES = ROOT / "benchmarks" / "landscapes"
SAMPLERS = [
    *("surrogate", "grid", "heuristic", "random", "tpe", "tpe-multivariate", "tpe-penalised"),
    "gp",
    "cmaes",
    "nsgaii",
    "qmc",
]

OTHER = single_metric(MetricInfo(name="other", unit=None, direction=Direction.MINIMIZE, source="script"))
"""An objective over a metric that no closed form predicts."""


@pytest.fixture(scope="module")
def recording() -> Recording:
    return load_recording(LANDSCAPES / "nanotron-8b-4n")


def make_view(recording: Recording, seen: Sequence[Observation] = (), **fields: object) -> SearchView:
    view = SearchView(recording.card, recording.space, tuple(seen), frozenset(), max(1, 15 - len(seen)), 0)
    return replace(view, **fields)  # type: ignore[arg-type]


def observe(recording: Recording, row: int, trial: int) -> Observation:
    measured = recording.rows[row]
    failure = None
    if measured.status != "ok":
        failure = Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message="recorded as failed")
    time_s = measured.metrics.get("step_time_s")
    return Observation(trial, measured.config, row, time_s, failure, metrics=measured.metrics)


def search(recording: Recording, name: str, trials: int, seed: int = 0) -> list[Observation]:
    proposer = make_sampler(name)
    seen: list[Observation] = []
    for trial in range(trials):
        proposals = proposer.propose(make_view(recording, seen, seed=seed, budget_left=trials - trial), 1)
        if not proposals:
            break
        row = recording.space.row(proposals[0].config)
        assert row is not None, "a proposal is in the search space"
        seen.append(observe(recording, row, trial))
    return seen


@pytest.mark.parametrize("name", SAMPLERS)
def test_proposals_are_untried_configurations_and_deterministic(recording, name):
    seen = search(recording, name, 5)
    rows = [o.row for o in seen]
    assert len(set(rows)) == 5
    view = make_view(recording, seen, pending=frozenset({1, 2, 3}))
    first = make_sampler(name).propose(view, 4)
    again = make_sampler(name).propose(view, 4)
    batch = [recording.space.row(proposal.config) for proposal in first]
    assert [proposal.config for proposal in first] == [proposal.config for proposal in again]
    assert len(set(batch)) == 4
    assert not set(batch) & (set(rows) | {1, 2, 3, None})


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_space_is_searched_until_every_row_was_tried(name):
    whole = load_recording(LANDSCAPES / "nanotron-8b-4n")
    rows = tuple(row for row in whole.rows if (row.metrics.get("peak_memory_gib") or 99) < 60)[:6]
    small = replace(whole, space=space_from_rows(whole.space.knobs, [row.config for row in rows]), rows=rows)
    assert sorted(o.row or 0 for o in search(small, name, 10)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["nanotron-8b-4n", "nanotron-3b-2n", "vtrain-h1024-l20-g8-b32"])
def test_the_default_gets_within_5_percent_of_the_best_in_ten_trials(name):
    recording = load_recording(LANDSCAPES / name)
    losses = [o.loss for o in search(recording, "default", 10) if o.loss is not None]
    assert min(losses) <= 1.05 * recording.best_value


def with_unknown_categories(recording: Recording) -> Recording:
    """Return the same table with an unknown knob: one of its three choices makes every step 40 % slower."""
    slow = {"zig": 1.0, "zag": 1.4, "zog": 1.15}
    rows = tuple(
        replace(
            row,
            config=type(row.config)({**row.config, "frobnicator": choice}),
            metrics={**row.metrics, "step_time_s": row.metrics["step_time_s"] * factor},
        )
        for row in recording.rows
        if row.metrics.get("step_time_s") is not None and row.metrics.get("step_time_s") < 20
        for choice, factor in slow.items()
    )
    knobs = (*recording.space.knobs, Knob("frobnicator", tuple(slow)))
    return replace(recording, space=space_from_rows(knobs, [row.config for row in rows]), rows=rows)


def test_the_effect_of_an_unknown_knob_is_learned(recording):
    unknown = with_unknown_categories(recording)
    seen = search(unknown, "default", 12)
    late = [o.config["frobnicator"] for o in seen[6:]]
    assert late.count("zag") <= 1
    assert min(o.loss for o in seen if o.loss) <= 1.05 * unknown.best_value


@pytest.mark.parametrize("of_time", [lambda s: -1000 / s, lambda s: math.log(s / 10), lambda s: 0.3 * s + 5])
def test_the_default_finds_the_best_by_a_loss_other_than_time(recording, of_time):
    seen: list[Observation] = []
    for trial in range(10):
        proposal = make_sampler("default").propose(make_view(recording, seen, target=OTHER), 1)[0]
        found = observe(recording, recording.space.row(proposal.config), trial)
        seen.append(found if found.loss is None else replace(found, loss=of_time(found.loss)))
    assert min(o.metrics["step_time_s"] for o in seen if o.loss is not None) <= 1.05 * recording.best_value


def test_after_failures_only_it_still_proposes(recording):
    failures = [n for n, row in enumerate(recording.rows) if row.status == "failed"][:6]
    seen = [observe(recording, row, trial) for trial, row in enumerate(failures)]
    assert len(make_sampler("default").propose(make_view(recording, seen), 3)) == 3


def test_an_out_of_memory_failure_lowers_p_fits_of_the_others(recording):
    row = recording.space.row({"tp": 1, "pp": 2, "dp": 16, "zero_stage": 1, "micro_batch_size": 1})
    assert row is not None
    config = recording.space.config(row)
    failure = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="CUDA out of memory")
    seen = [Observation(0, config, row, None, failure=failure)]
    others = [n for n in range(len(recording.space)) if n != row]
    before, after = (fit_posterior(make_view(recording, trials)) for trials in ([], seen))
    assert after.rows_m.tolist() == others
    assert np.all(after.p_fits_m <= before.p_fits_m[others] + 0.05)
    assert np.mean(after.p_fits_m) < np.mean(before.p_fits_m) - 0.02


def test_warm_start_observations_are_used(recording):
    earlier = tuple(replace(o, row=None) for o in search(recording, "default", 8))
    proposals = make_sampler("default").propose(make_view(recording, prior=earlier), 1)
    found = recording.look_up(proposals[0].config)
    assert found.metrics.get("step_time_s") is not None
    assert found.metrics.get("step_time_s") <= 1.15 * recording.best_value


def survey(recording: Recording, seen: Sequence[Observation], top: int = 10) -> SearchSnapshot:
    view = make_view(recording, seen)
    posterior = fit_posterior(view)
    assert posterior is not None
    return summarize_posterior(view, posterior, top)


def test_the_snapshot_has_what_is_left_and_the_prediction_error(recording):
    empty = survey(recording, [])
    assert empty.max_expected_improvement is None
    assert empty.median_error is None
    assert len(empty.top_rows) == 10
    seen = search(recording, "default", 8)
    later = survey(recording, seen, top=5)
    assert later.num_open == len(recording.space) - 8
    assert later.median_error is not None
    assert 0 <= (later.p_improvement or 0) <= 1
    assert not {o.row for o in seen} & set(later.top_rows)
    slowest = max((row.metrics.get("step_time_s") or 0.0, n) for n, row in enumerate(recording.rows))[1]
    all_but_one = [observe(recording, row, row) for row in range(len(recording.space)) if row != slowest]
    assert (survey(recording, all_but_one).max_expected_improvement or 0) < 0.001, "the slowest row cannot win"


def test_the_pareto_front_improves_in_both_metrics(recording):
    seen = search(recording, "default", 6)
    view = make_view(recording, seen)
    proposals = propose_pareto(view, 4, (("step_time_s", "minimize"), ("peak_memory_gib", "minimize")))
    rows = [recording.space.row(proposal.config) for proposal in proposals]
    assert len(set(rows)) == 4
    assert not set(rows) & {o.row for o in seen}
    expected = [proposal.expects.metrics["peak_memory_gib"] for proposal in proposals]
    assert min(expected) < min(o.metrics.get("peak_memory_gib", 99) for o in seen), (
        "some proposals aim at the low-memory end of the Pareto front"
    )
    with pytest.raises(ValueError, match="at least two"):
        propose_pareto(view, 1, (("step_time_s", "minimize"),))


def test_the_default_works_as_an_optuna_sampler(recording):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=SurrogateSampler(recording.card, recording.space))
    configs = set()
    for _ in range(6):
        trial = study.ask(search_space_distributions(recording.space))
        found = recording.look_up(trial.params)
        configs.add(found.config)
        if found.metrics.get("step_time_s") is None:
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, found.metrics.get("step_time_s"))
    assert len(configs) == 6
    assert study.best_value <= 1.2 * recording.best_value
    with pytest.raises(UserError, match="has no knob"):
        study.ask({"colour": optuna.distributions.CategoricalDistribution(("red", "blue"))})


def test_a_loss_that_falls_with_step_time_is_learned(recording):
    seen = [o if o.loss is None else replace(o, loss=1000 / o.loss) for o in search(recording, "default", 5)]
    posterior = fit_posterior(make_view(recording, seen, target=OTHER))
    assert np.corrcoef(posterior.mean_m, posterior.log_cost_m)[0, 1] < -0.5


def test_a_failure_that_an_llm_chose_does_not_raise_the_penalty(recording):
    failing = next(n for n, row in enumerate(recording.rows) if row.status == "failed")
    running = next(n for n, row in enumerate(recording.rows) if row.status == "ok")
    seen = [observe(recording, row, trial) for trial, row in enumerate((running, failing))]
    view = replace(make_view(recording, seen), budget_left=5)
    assert failure_penalty(replace(view, llm_rows=frozenset({failing}))) < failure_penalty(view)


CARD = load_card("wl2")  # on 16 accelerators
FAILED = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")


def make_space(num_buckets: int) -> Space:
    """Return a space with a free knob of that many choices, which no closed form knows."""
    knobs = (
        Knob("tp", (1, 2, 4, 8)),
        Knob("pp", (1, 2)),
        Knob("dp", (1, 2, 4, 8, 16)),
        Knob("micro_batch_size", (1, 2)),
        Knob("bucket", tuple(range(num_buckets))),
    )
    codes = np.array(list(itertools.product(*(range(len(knob.choices)) for knob in knobs))), dtype=np.int16)
    degrees = [knob.column[codes[:, k]] for k, knob in enumerate(knobs[:3])]
    return Space(knobs, codes[degrees[0] * degrees[1] * degrees[2] == 16], num_raw=len(codes))


def observe_rows(space: Space, rows: list[int]) -> tuple[Observation, ...]:
    """Return observations of these rows: bucket 7 is fast, one in nine fails."""
    found = []
    for n, row in enumerate(rows, start=1):
        config = space.config(row)
        time_s = 5.0 + float(config.as_int("tp")) + (0.0 if config["bucket"] == 7 else 1.0) + n / 1e4
        fails = n % 9 == 0
        metrics = {} if fails else {"step_time_s": time_s}
        found.append(Observation(n, config, row, None if fails else time_s, FAILED if fails else None, metrics=metrics))
    return tuple(found)


def view_of(space: Space, count: int, **fields: Any) -> SearchView:
    rows = np.random.default_rng(3).permutation(len(space))[:count].tolist()
    return SearchView(CARD, space, observe_rows(space, rows), frozenset(), 50, 0, **fields)


def test_all_observations_are_kept_up_to_the_bound():
    seen = view_of(make_space(100), MAX_OBSERVATIONS).observations
    assert select_window(seen) is seen


def test_a_window_keeps_the_best_the_latest_and_some_failures_in_their_order():
    seen = view_of(make_space(100), 700).observations
    window = select_window(seen)
    assert len(window) == MAX_OBSERVATIONS
    assert [o.trial for o in window] == sorted(o.trial for o in window)
    best = sorted((o for o in seen if o.loss is not None), key=lambda o: o.loss or 0.0)[: MAX_OBSERVATIONS // 2]
    assert {o.trial for o in best} | {700, 699, 698} <= {o.trial for o in window}
    assert sum(o.failure is not None for o in window) >= 3
    assert min(o.trial for o in window if o.trial not in {b.trial for b in best}) < 100, "early trials are kept too"


def test_a_window_of_failures_only_is_full():
    failures = tuple(Observation(n, make_space(1).config(0), 0, None, FAILED) for n in range(1, 200))
    assert len(select_window(failures)) == MAX_OBSERVATIONS


@pytest.mark.parametrize("count", [100, 1000])
def test_models_are_fitted_to_as_many_observations_however_many_there_are(count, monkeypatch):
    sizes = []
    for module in (ensemble, feasibility):
        plain = module.calibrate

        def counted(model: Any, features: Any, prior: Any, data: Any, plain: Any = plain) -> Any:
            sizes.append(len(data.rows_n))
            return plain(model, features, prior, data)

        monkeypatch.setattr(module, "calibrate", counted)
    view = view_of(make_space(100), count)
    posterior = fit_posterior(view)
    assert 0 < max(sizes) <= MAX_OBSERVATIONS
    assert len(posterior.rows_m) == candidates.MAX_CANDIDATES_WINDOWED
    assert posterior.best == pytest.approx(np.log(min(o.loss for o in view.observations if o.loss is not None)))


def test_a_large_space_is_ranked_once_until_the_trials_double(monkeypatch):
    space = make_space(1000)
    assert len(space) > candidates.MAX_RANKED
    ranked: list[int] = []
    plain = candidates._rank

    def counted(models: Any, rows: Any) -> Any:
        ranked.append(len(rows))
        return plain(models, rows)

    monkeypatch.setattr(candidates, "_rank", counted)
    for count in (40, 41, 42, 63, 64):
        view = view_of(space, count)
        (proposal,) = DefaultProposer().propose(view, 1)
        row = space.row(proposal.config)
        assert row is not None
        assert not view.taken_N[row]
    assert sum(ranked) - 5 * candidates.MAX_RANKED == 2 * len(space), "at 32 and at 64 trials, in chunks"


def test_neighbours_of_the_best_are_candidates_of_a_large_space():
    space = make_space(1000)
    view = view_of(space, 90)
    posterior = fit_posterior(view)
    best = min((o for o in view.observations if o.loss is not None), key=lambda o: o.loss or 0.0)
    differ = [
        sum(best.config[name] != value for name, value in space.config(int(row)).items()) for row in posterior.rows_m
    ]
    assert differ.count(1) >= 10
    assert not view.taken_N[posterior.rows_m].any()


def test_the_same_view_gets_the_same_proposals_from_a_new_process_state():
    view = view_of(make_space(1000), 70)
    first = DefaultProposer().propose(view, 3)
    candidates._RANKINGS.clear()
    assert [p.config for p in DefaultProposer().propose(view, 3)] == [p.config for p in first]


def test_rows_are_found_by_their_codes_and_others_are_not():
    space = make_space(50)
    order = np.random.default_rng(0).permutation(len(space))
    shuffled = Space(space.knobs, space.codes_NK[order], space.num_raw)
    assert shuffled.find_rows(space.codes_NK).tolist() == np.argsort(order).tolist()
    outside = np.array([[3, 1, 4, 0, 0]], dtype=np.int16)  # 8 x 2 x 16 ranks
    assert shuffled.find_rows(outside).tolist() == [-1]
    assert shuffled.row(shuffled.config(17)) == 17


def test_held_back_rows_are_a_set_and_are_never_proposed():
    space = make_space(100)
    mask_N = np.zeros(len(space), dtype=bool)
    mask_N[5:] = True
    view = view_of(space, 0, held_back=RowSet(mask_N))
    assert (7 in view.held_back, 3 in view.held_back, len(view.held_back)) == (True, False, len(space) - 5)
    assert view.held_back == frozenset(range(5, len(space)))
    assert np.flatnonzero(~view.taken_N).tolist() == [0, 1, 2, 3, 4]
    assert view.is_closed(9)
    assert not view.is_closed(2)
