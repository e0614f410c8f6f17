"""What the simulation of a load adds to the closed forms of serving."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_serving_prediction import ZERO, make_card, make_space

from cclsearch.card.model import Card
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.scoring.objective import choose_objective
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Predictor, predict_space
from cclsearch.tasks.base import task_of
from cclsearch.tasks.serving.closed_form import predictor as prediction
from cclsearch.tasks.serving.closed_form.replica import read_replica
from cclsearch.tasks.serving.closed_form.steady_state import serve, time_parts
from cclsearch.tasks.serving.closed_form.steps import compute_load, read_costs
from cclsearch.tasks.serving.contract import PlannedRequest
from cclsearch.tasks.serving.measurements import THROUGHPUT
from cclsearch.tasks.serving.simulation.load import SimulatedLoad, Simulator
from cclsearch.tasks.serving.simulation.step_times import StepMix, StepTimes


def build(card: Card, space: Space) -> Predictor:
    predictor = task_of(card).predictor(card, space)
    assert predictor is not None
    return predictor


def refine(predictor: Predictor, rows: Any) -> Predictor:
    assert predictor.refine is not None
    thetas = {metric: form.prior.mean_P for metric, form in predictor.forms.items()}
    return predictor.refine(predictor, thetas, np.asarray(rows))


def expect(predictor: Predictor, metric: str) -> np.ndarray:
    return predictor.forms[metric].expect(np.arange(len(predictor.features)))


def make_trace(folder: Path, count: int = 60) -> str:
    """A trace in BurstGPT's format: bursts of requests of unlike lengths."""
    rng = np.random.default_rng(1)
    path = folder / "burst.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("Timestamp", "Model", "Request tokens", "Response tokens"))
        for n in range(count):
            writer.writerow((2.0 * (n // 20), "m", int(rng.integers(100, 3000)), int(rng.integers(20, 300))))
    return str(path)


@pytest.mark.parametrize("knobs", [{"tp": (1, 2, 8)}, {"tp": (4,), "pp": (1, 2)}, {"tp": (2,), "batch_bucket": (1, 8)}])
def test_a_step_without_prompts_is_the_decode_step_of_the_closed_form(knobs):
    card, space = make_card(), make_space(**knobs)
    at = read_replica(card, space)
    closed = time_parts(compute_load(card, at, 16.0, 1024, 256), ZERO)
    sequences = 16 / at.pp
    none = np.zeros(len(space))
    mix = StepMix(none, none, none, sequences, sequences * (1024 + 128))
    assert StepTimes.calibrated(read_costs(card, at), ZERO).seconds(mix) == pytest.approx(closed.step)


def test_a_step_with_one_prompt_alone_is_the_prompt_of_the_closed_form():
    card, space = make_card(), make_space(tp=(1, 4), max_num_batched_tokens=(1024,))
    at = read_replica(card, space)
    closed = time_parts(compute_load(card, at, 1.0, 1024, 256), ZERO)
    none, one = np.zeros(len(space)), np.ones(len(space))
    mix = StepMix(1024 * one, 1024 * 512 * one, one, none, none)
    found = StepTimes.calibrated(read_costs(card, at), ZERO).seconds(mix)
    assert found == pytest.approx(closed.alone, rel=0.01)


def test_a_step_with_prompts_and_answers_takes_less_than_both_apart_and_no_less_than_either():
    card, space = make_card(), make_space(tp=(1, 8))
    times = StepTimes.calibrated(read_costs(card, read_replica(card, space)), ZERO)
    none, one = np.zeros(len(space)), np.ones(len(space))
    prompt = times.seconds(StepMix(512 * one, 512 * 256 * one, one, none, none))
    answers = times.seconds(StepMix(none, none, none, 16 * one, 16e3 * one))
    both = times.seconds(StepMix(512 * one, 512 * 256 * one, one, 16 * one, 16e3 * one))
    assert (both < prompt + answers).all()
    assert (both >= np.maximum(prompt, answers)).all()


@pytest.mark.parametrize("clients", [4, 64])
def test_a_long_steady_load_has_the_throughput_of_the_closed_form(clients):
    card, space = make_card(), make_space(tp=(4, 8))
    at = read_replica(card, space)
    rng = np.random.default_rng(0)
    lengths = rng.integers(192, 321, 12 * clients).tolist()
    load = SimulatedLoad(tuple(PlannedRequest(input_tokens=256, output_tokens=n) for n in lengths), clients, {})
    found = Simulator.read(card, at).run(load, ZERO)
    closed = serve(compute_load(card, at, float(clients), 256, 256), ZERO)
    assert found[THROUGHPUT] == pytest.approx(1 / closed.cost, rel=0.15)
    assert found["tpot_mean_s"] == pytest.approx(closed.tpot_s, rel=0.15)


def test_a_request_trace_is_predicted_with_its_bursts(tmp_path):
    card = make_card(concurrency=None, arrival="trace", request_trace=make_trace(tmp_path))
    predictor = build(card, make_space(tp=(4, 8), max_num_seqs=(4, 64)))
    found = refine(predictor, np.arange(4))
    assert set(predictor.forms) == {THROUGHPUT, "tpot_mean_s", "ttft_mean_s"}
    p50, p90, p99 = (expect(found, f"ttft_{name}_s") for name in ("p50", "p90", "p99"))
    assert (p50 < p90).all()
    assert (p90 < p99).all()
    few, many = expect(found, "ttft_p99_s")[[0, 1]]
    assert few > 2 * many, "20 requests at once wait for 4 places"


def test_a_trace_that_is_gone_is_not_predicted():
    card = make_card(concurrency=None, arrival="trace", request_trace="gone.csv")
    assert task_of(card).predictor(card, make_space(tp=(8,))) is None


def test_rows_beyond_the_simulated_ones_have_the_median_of_these():
    card = make_card(concurrency=None, arrival="poisson", request_rate=4.0, num_requests=60)
    predictor = build(card, make_space(tp=(1, 2, 4, 8), max_num_seqs=(4, 8, 64)))
    some, every = refine(predictor, [0, 4, 8]), refine(predictor, np.arange(12))
    assert (some.num_refined, every.num_refined) == (3, 12)
    assert expect(some, "ttft_mean_s")[[0, 4, 8]] == pytest.approx(expect(every, "ttft_mean_s")[[0, 4, 8]])
    lean = np.log(expect(some, "ttft_mean_s") / expect(predictor, "ttft_mean_s"))
    assert np.delete(lean, [0, 4, 8]) == pytest.approx(float(np.median(lean[[0, 4, 8]])))


def test_means_of_a_closed_loop_of_equal_requests_stay_those_of_the_closed_form():
    predictor = build(make_card(), make_space(tp=(1, 2, 4, 8)))
    found = refine(predictor, np.arange(4))
    for metric in predictor.forms:
        assert expect(found, metric) == pytest.approx(expect(predictor, metric))
    assert (expect(found, "tpot_p99_s") >= expect(found, "tpot_p50_s")).all()
    whole = expect(found, "ttft_mean_s") + 255 * expect(found, "tpot_mean_s")
    assert expect(found, "e2e_mean_s") == pytest.approx(whole)


def test_accepted_guesses_count_if_the_card_says_how_many():
    space = make_space(tp=(8,), speculative=("none", "ngram"))
    unknown, known = build(make_card(), space), build(make_card(accepted_tokens_per_step=2.5), space)
    plain = expect(unknown, THROUGHPUT)
    assert plain[0] == pytest.approx(plain[1])
    without, guessed = expect(known, THROUGHPUT)
    assert without == pytest.approx(plain[0])
    assert 1.5 * without < guessed < 2.5 * without
    tpot = expect(refine(known, [0, 1]), "tpot_p90_s")
    assert tpot[1] < tpot[0]


def test_a_cache_of_prefixes_shortens_prompts_by_whole_blocks():
    space = make_space(tp=(8,), prefix_caching=(False, True), block_size=(16, 64))
    card = make_card(shared_prefix_tokens=1000)
    at = read_replica(card, space)
    assert at.cached.tolist() == [0, 0, 992, 960]
    found = expect(refine(build(card, space), np.arange(4)), "ttft_p50_s")
    assert found[2] < found[0]
    assert found[2] <= found[3], "smaller blocks leave less of a prompt"


def test_a_large_space_is_predicted_in_chunks_as_at_once(monkeypatch):
    card = make_card(concurrency=None, arrival="poisson", request_rate=4.0)
    space = make_space(tp=(1, 2, 4, 8), max_num_seqs=(4, 8, 64))
    whole = predict_space(card, space, build(card, space))
    monkeypatch.setattr(prediction, "MAX_PARTS", 1)
    parts = predict_space(card, space, build(card, space))
    assert parts.value_N == pytest.approx(whole.value_N)
    assert parts.parts.keys() == whole.parts.keys()


def test_a_limit_on_a_percentile_is_judged_before_any_trial_and_learned_by_trials():
    card = make_card(concurrency=None, arrival="poisson", request_rate=3.0, num_requests=60)
    space = make_space(tp=(1, 2, 4, 8), max_num_seqs=(2, 64))
    predictor = build(card, space)
    p99 = expect(refine(predictor, np.arange(8)), "ttft_p99_s")
    limit = float(np.sqrt(p99.min() * p99.max()))
    objective = choose_objective(THROUGHPUT, (f"ttft_p99_s <= {limit}",), task=card.task)
    view = SearchView(card, space, (), frozenset(), 15, 0, objective, next_trial=1)
    posterior = fit_posterior(view, predictor)
    assert posterior.p_satisfies_m[p99.argmin()] > posterior.p_satisfies_m[p99.argmax()]
    row = int(p99.argmin())
    metrics = {THROUGHPUT: 10.0, "tpot_mean_s": 0.02, "ttft_mean_s": 3 * limit, "ttft_p99_s": 4 * limit}
    seen = Observation(1, space.config(row), row, None, metrics=metrics, violation=3.0)
    after = fit_posterior(SearchView(card, space, (seen,), frozenset({row}), 14, 0, objective, next_trial=2), predictor)
    near = [m for m, each in enumerate(after.rows_m.tolist()) if each == row + 1 or each == row - 1]
    assert after.p_satisfies_m[near].max() < posterior.p_satisfies_m[p99.argmin()]
