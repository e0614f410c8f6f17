"""Loads of serving: several at once, requests that arrive, prompts and answers on their own engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_recording_loads import CARD, ROWS, write
from test_serving import ANSWERED, evidence_of
from test_serving import make_card as make_small_card
from test_serving_prediction import LLAMA_70B, MIXTRAL, ZERO, make_card, make_space

from cclsearch.card.hardware import find_accelerator
from cclsearch.cli import main
from cclsearch.plugins import TASKS
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.surrogate import CandidatePosterior, fit_posterior
from cclsearch.propose.warm_start.apply import apply_earlier
from cclsearch.propose.warm_start.learn import learn_knowledge
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger
from cclsearch.recording.load import load_recording
from cclsearch.scoring.objective import Objective, choose_objective
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import predict_space, predictor_of
from cclsearch.tasks.serving.closed_form.disaggregation import compute_parts, read_deployment
from cclsearch.tasks.serving.closed_form.replica import read_replica
from cclsearch.tasks.serving.closed_form.steady_state import Arrivals, Served, serve, serve_open, time_parts
from cclsearch.tasks.serving.closed_form.steps import MULTIPLIERS, TPOT, TTFT, LoadParts, compute_load
from cclsearch.tasks.serving.measurements import THROUGHPUT, choose_load

SPACE = make_space(tp=(1, 2, 4, 8))
LOADS = (1.0, 4.0, 16.0, 64.0)
LIMIT_S = 0.06


def measure(row: int, slower: float = 1.0) -> list[dict[str, float]]:
    """The loads of a row on a server that takes this many times as long as predicted."""
    card, found = make_card(concurrency=16), []
    for clients in LOADS:
        served = serve(compute_load(card, read_replica(card, SPACE), clients, 1024, 256), np.zeros(len(MULTIPLIERS)))
        ttft, tpot = slower * served.ttft_s[row], slower * served.tpot_s[row]
        rate = clients * 256 / (ttft + 255 * tpot) / SPACE.num_accelerators_N[row]
        found.append({"concurrency": clients, TTFT: float(ttft), TPOT: float(tpot), THROUGHPUT: float(rate)})
    return found


def observe(row: int, loads: Sequence[dict[str, float]], objective: Objective) -> Observation:
    chosen = choose_load(loads, {TPOT: (None, LIMIT_S)})
    assert chosen is not None
    violation = objective.violation(loads[chosen])
    loss = None if violation else objective.loss(loads[chosen])
    return Observation(1, SPACE.config(row), row, loss, metrics=loads[chosen], loads=tuple(loads), violation=violation)


def posterior_after(*loads: Sequence[dict[str, float]], space: Space = SPACE) -> CandidatePosterior:
    """Return the posterior of the other rows after a trial of the second one for each of these."""
    card, task = make_card(concurrency=None, max_concurrency=64), TASKS.get("serving")
    objective = task.constrain(card, choose_objective(THROUGHPUT, (f"{TPOT} <= {LIMIT_S}",), task="serving"))
    seen = tuple(observe(1, each, objective) for each in loads)
    view = SearchView(task.freeze(card, objective), space, seen, frozenset(), 5, 0, objective, next_trial=2)
    found = fit_posterior(view)
    assert found is not None
    return found


def test_a_trial_teaches_every_load_that_it_measured_and_not_the_best_alone():
    slow = measure(1, slower=1.6)
    all_loads, best_alone = posterior_after(slow), posterior_after([slow[0]])
    true = [max(load[THROUGHPUT] for load in measure(row, 1.6) if load[TPOT] <= LIMIT_S) for row in (2, 3)]
    rows = [list(all_loads.rows_m).index(row) for row in (2, 3)]
    assert all_loads.value_m[rows] == pytest.approx(true, rel=0.2)
    assert np.all(all_loads.sd_m[rows] < best_alone.sd_m[rows])


def test_the_chance_to_keep_a_limit_falls_if_a_trial_is_slower_than_predicted():
    row = list(posterior_after(measure(1)).rows_m).index(0)  # one accelerator reads all weights: near the limit
    chances = [posterior_after(measure(1, slower)).p_satisfies_m[row] for slower in (0.25, 1.0, 3.0)]
    assert chances[0] > 0.9
    assert chances[2] < 0.1
    assert chances[0] >= chances[1] >= chances[2]


def test_the_surrogate_expects_only_the_loads_that_a_row_was_recorded_with():
    configs = [SPACE.config(row) for row in range(len(SPACE))]
    recorded = space_from_rows(SPACE.knobs, configs, [LOADS, LOADS, LOADS, (1.0,)])
    known, unknown = (posterior_after(space=space) for space in (recorded, SPACE))
    assert known.value_m[3] < unknown.value_m[3] / 2, "one client at a time is all that the last row was measured with"
    assert known.value_m[2] == pytest.approx(unknown.value_m[2], rel=0.2)
    prediction = [predict_space(make_card(concurrency=None, max_concurrency=64), space) for space in (recorded, SPACE)]
    assert prediction[0].value_N[3] < prediction[1].value_N[3] / 2


def test_the_windows_beginning_and_end_lower_the_expected_throughput_as_in_the_trials():
    whole = measure(1)
    ramped = [load | {THROUGHPUT: 0.7 * load[THROUGHPUT]} for load in whole]
    fast, slow = posterior_after(whole), posterior_after(ramped)
    assert slow.value_m == pytest.approx(0.7 * fast.value_m, rel=0.05)


def test_other_work_learns_from_every_load():
    card = make_card(concurrency=None, max_concurrency=64)
    predictor = predictor_of(card, SPACE)
    objective = choose_objective(THROUGHPUT, (), task="serving")
    trials = [observe(row, measure(row, 1.4), objective) for row in (0, 1, 3)]
    adapted = apply_earlier(predictor, SPACE, learn_knowledge(card, predictor, [(card, trials)]))
    before, after = predict_space(card, SPACE), predict_space(card, SPACE, adapted)
    true = max(load[THROUGHPUT] for load in measure(2, 1.4))
    assert abs(np.log(after.value_N[2] / true)) < abs(np.log(before.value_N[2] / true)) / 1.5
    assert adapted.loads.priors[TPOT].mean_P[0] > predictor.loads.priors[TPOT].mean_P[0] == 0


def test_a_ledger_keeps_the_loads_of_each_trial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "r")
    assert main(["run", "--recording", str(folder), "--budget", "4", "--constraint", "tpot_mean_s <= 0.02"]) == 0
    recording = load_recording(folder)
    seen = fold_ledger(next((tmp_path / "runs").iterdir()) / LEDGER_FILE).trials.observe(recording.space)
    assert len(seen) == 4
    for trial in seen:
        assert trial.row is not None
        several = recording.rows[trial.row].loads if len(recording.rows[trial.row].loads) > 1 else ()
        assert [load[TPOT] for load in trial.loads] == [load[TPOT] for load in several]
        assert trial.metrics[TPOT] in [load[TPOT] for load in recording.rows[trial.row].loads]


def test_a_trial_of_one_load_or_with_a_second_load_lists_none(tmp_path):
    task, card = TASKS.get("serving"), make_small_card(num_requests=4)
    assert task.list_loads(evidence_of(card, tmp_path, ANSWERED)) == []
    other = [{"concurrency": 2, "window_s": 1.0}, {"concurrency": 1, "window_s": 1.0, "is_other": True}]
    records = [*ANSWERED, *({**each, "load": 1} for each in ANSWERED)]
    assert task.list_loads(evidence_of(card, tmp_path, records, loads=other)) == []
    both = [load | {"is_other": False} for load in other]
    assert [load["concurrency"] for load in task.list_loads(evidence_of(card, tmp_path, records, loads=both))] == [2, 1]


def test_a_recording_of_a_published_model_without_a_shape_has_the_published_one(tmp_path):
    named: dict[str, Any] = {"phase": "inference", "moe": False, "model_family": "meta-llama/Llama-3.1-8B-Instruct"}
    known = write_model(tmp_path / "known", named)
    assert (known.num_layers, known.num_kv_heads, known.intermediate_size, known.vocab_size) == (32, 8, 14336, 128256)
    unknown = write_model(tmp_path / "unknown", {**named, "model_family": "my-own"})
    assert unknown.num_kv_heads == 32, "a guess, which the notes say"


def write_model(folder: Path, model: dict[str, Any]) -> Any:
    card = {**CARD, "workload": {**CARD["workload"], "model": model}}  # type: ignore[dict-item]
    write(folder, ROWS.replace("fp8", "bf16").replace("fp4", "bf16"))
    (folder / "card.yaml").write_text(yaml.safe_dump(card))
    return load_recording(folder).card.arch


@pytest.mark.parametrize(("chip", "ratio"), [("nvidia_h100", 1.0), ("nvidia_b200", 2.4)])
def test_weights_of_four_bits_are_computed_in_sixteen_unless_the_device_has_units_for_four(chip, ratio):
    card = make_card(alternative_precisions=["fp4", "int4"])
    card = card.model_copy(update={"hardware": card.hardware.model_copy(update={"accelerator": chip})})
    at = read_replica(card, make_space(tp=(1,), precision=("bf16", "fp4", "int4")))
    rates = at.flops_per_s / at.flops_per_s[0]
    assert rates == pytest.approx([1.0, ratio, 1.0], rel=0.1), "kernels for 4 bits reach less of their peak"
    assert at.reads[2] < at.reads[1] == 1, "integers are widened as they are read"


def test_servers_admit_what_their_engine_does_on_the_accelerator_unless_told():
    space = make_space(backend=("vllm", "sglang", "trtllm"), tp=(1,))
    for chip, vllm, sglang in (("nvidia_h100", 8192, 8192), ("nvidia_b200", 16384, 16384), ("nvidia_a100", 2048, 8192)):
        card = make_card()
        found = find_accelerator(chip, 80 if chip != "nvidia_b200" else None)
        hardware = card.hardware.model_copy(update={"accelerator": found.name, "memory_gib": found.memory_gib})
        at = read_replica(card.model_copy(update={"hardware": hardware}), space)
        assert at.tokens.tolist() == [vllm, sglang, 8192], chip
        assert at.is_chunked.tolist() == [1, 1, 0]
    told = read_replica(make_card(), make_space(tp=(1,), max_num_seqs=(64,), max_num_batched_tokens=(512,)))
    assert (told.sequences[0], told.tokens[0]) == (64, 512)


def test_a_trial_that_was_not_admitted_teaches_no_load():
    loads = measure(1, slower=3.0)
    card, objective = make_card(concurrency=None, max_concurrency=64), choose_objective(THROUGHPUT, (), task="serving")
    seen = replace(observe(1, loads, objective), loss=None, violation=0.0)
    view = SearchView(card, SPACE, (seen,), frozenset(), 5, 0, objective, next_trial=2)
    after, before = fit_posterior(view), fit_posterior(replace(view, observations=()))
    rows = np.isin(before.rows_m, after.rows_m)
    assert after.value_m == pytest.approx(before.value_m[rows], rel=0.1)


ANSWER, PLACES, PREFILL_S, REQUEST_S = 60, 16, 0.03, 0.05
STEP_S, SEQUENCE_S = 0.01, 0.0005
CAPACITY = PLACES / (ANSWER * (STEP_S + SEQUENCE_S * PLACES) + PLACES * PREFILL_S)
"""Requests per second that one server answers at most."""


def step_s(sequences: float) -> float:
    return STEP_S + SEQUENCE_S * sequences


def make_loads(replicas: int = 1) -> LoadParts:
    """One configuration at 1, 2, 4, ... clients."""
    batches = np.array([1.0, 2.0, 4.0, 8.0, 16.0])[:, None]
    fields = dict.fromkeys(LoadParts.__dataclass_fields__, np.zeros_like(batches))
    fields |= {
        "batch": batches, "replicas": np.full_like(batches, replicas), "accelerators": np.full_like(batches, replicas),
        "weights": np.full_like(batches, STEP_S), "kv_cache": SEQUENCE_S * batches,
        "prefill": np.full_like(batches, PREFILL_S), "prefill_alone": np.full_like(batches, PREFILL_S),
        "answer": np.full_like(batches, ANSWER), "clients": batches * replicas,
        "request": np.full_like(batches, REQUEST_S),
    }  # fmt: skip
    return LoadParts(**fields)


def predict(arrivals: Arrivals, replicas: int = 1) -> Served:
    return serve_open(make_loads(replicas), np.zeros(len(MULTIPLIERS)), arrivals)


def simulate(arrivals: Arrivals, seed: int) -> tuple[float, float, float]:
    """Mean seconds to the first token and per token, and tokens per second, of one server."""
    rng = np.random.default_rng(seed)
    shape = arrivals.spread**-2 if arrivals.spread else 0.0
    gaps = (
        rng.gamma(shape, 1 / shape / arrivals.rate, arrivals.count)
        if shape
        else np.full(arrivals.count, 1 / arrivals.rate)
    )
    due = list(np.cumsum(gaps) - gaps[0])
    now, running, first, tpot, arrived = 0.0, [], [], [], list(due)
    while due or running:
        if due and due[0] <= now and len(running) < PLACES:
            came = due.pop(0)
            now += PREFILL_S
            first.append(now - came + REQUEST_S)
            running.append([now, ANSWER - 1])
        elif running:
            now += step_s(len(running))
            for sequence in running:
                sequence[1] -= 1
            tpot += [(now - start) / (ANSWER - 1) for start, left in running if left == 0]
            running = [sequence for sequence in running if sequence[1] > 0]
        else:
            now = due[0]
    return float(np.mean(first)), float(np.mean(tpot)), arrivals.count * ANSWER / (now - arrived[0])


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_below_its_capacity_a_server_has_the_latencies_of_a_simulation(share, spread):
    arrivals = Arrivals(share * CAPACITY, spread, 1500)
    ttft, tpot, rate = np.mean([simulate(arrivals, seed) for seed in range(3)], axis=0)
    found = predict(arrivals)
    assert found.tpot_s[0] == pytest.approx(tpot, rel=0.15)
    assert found.ttft_s[0] == pytest.approx(ttft, rel=0.35)
    assert 1 / found.cost[0] == pytest.approx(rate, rel=0.05)


def test_beyond_its_capacity_a_server_falls_behind_for_as_long_as_requests_arrive():
    for count in (200, 800):
        arrivals = Arrivals(1.5 * CAPACITY, 1.0, count)
        ttft, tpot, rate = np.mean([simulate(arrivals, seed) for seed in range(3)], axis=0)
        found = predict(arrivals)
        assert found.ttft_s[0] == pytest.approx(ttft, rel=0.25)
        assert found.tpot_s[0] == pytest.approx(tpot, rel=0.15)
        assert 1 / found.cost[0] == pytest.approx(rate, rel=0.1)


def test_bursts_delay_first_tokens_more_than_a_poisson_process():
    steady, bursts = (predict(Arrivals(0.6 * CAPACITY, spread, 400)) for spread in (1.0, 2.0))
    assert bursts.ttft_s[0] > steady.ttft_s[0]


def test_replicas_share_the_requests_and_parts_add_up():
    one, two = predict(Arrivals(2.0, 0.0, 400)), predict(Arrivals(4.0, 0.0, 400), replicas=2)
    assert two.tpot_s == pytest.approx(one.tpot_s)
    assert sum(one.parts.values()) == pytest.approx(one.cost)


INPUT, OUTPUT = 1024.0, 256.0


def make_apart(*workers: tuple[int, int], **other: Any) -> Space:
    """One configuration for each pair of numbers of workers, all of four GPUs."""
    fixed = {"prefill_gpus_per_worker": 4, "decode_gpus_per_worker": 4, **other}
    rows = [{"prefill_workers": front, "decode_workers": back, **fixed} for front, back in workers]
    knobs = tuple(Knob(name, tuple(sorted({row[name] for row in rows}))) for name in rows[0])
    return space_from_rows(knobs, rows)


@pytest.mark.parametrize("clients", [1.0, 30.0, 2000.0])
@pytest.mark.parametrize("arch", [LLAMA_70B, MIXTRAL])
def test_every_client_is_somewhere_and_the_accelerators_are_counted_once(arch, clients):
    card, space = make_card(arch), make_apart((1, 1), (1, 4), (4, 1), (3, 2))
    at = read_deployment(card, space)
    parts = compute_parts(card, at, clients, INPUT, OUTPUT)
    served, times = serve(parts, ZERO), time_parts(parts, ZERO)
    assert at.accelerators.tolist() == [8, 20, 20, 20]
    requests_per_s = at.accelerators / served.cost / OUTPUT
    assert requests_per_s * (served.ttft_s + OUTPUT * served.tpot_s) == pytest.approx(clients, rel=1e-6), "Little's law"
    assert (requests_per_s <= parts.prefillers / times.prefill * (1 + 1e-9)).all(), "no more than can be prefilled"
    assert sum(served.parts.values()) == pytest.approx(served.cost)


def test_the_workers_that_set_the_rate_are_worth_more_and_the_others_nothing():
    card = make_card()
    at = read_deployment(card, make_apart((1, 4), (2, 4), (1, 8)))
    served = serve(compute_parts(card, at, 4000.0, INPUT, OUTPUT), ZERO)
    rate = at.accelerators / served.cost
    assert rate[1] / rate[0] == pytest.approx(2.0, rel=0.02)
    assert rate[2] == pytest.approx(rate[0])
    assert served.ttft_s[1] < served.ttft_s[0]


def test_prompts_of_others_do_not_slow_answers_down():
    card = make_card()
    apart = serve(compute_parts(card, read_deployment(card, make_apart((4, 1))), 64.0, INPUT, OUTPUT), ZERO)
    whole = serve(compute_parts(card, read_deployment(card, make_space(tp=(4,))), 64.0, INPUT, OUTPUT), ZERO)
    assert apart.tpot_s[0] < 0.9 * whole.tpot_s[0]


def test_both_kinds_of_servers_can_be_in_one_space():
    card = make_card(concurrency=32)
    mixed = make_apart((0, 1), (2, 1), tp=4, decode_ep=1)
    whole = predictor_of(card, make_space(tp=(4,))).forms
    apart = predictor_of(card, make_apart((2, 1))).forms
    for name, form in predictor_of(card, mixed).forms.items():
        expected = [float(forms[name].predict(1)[0][0]) for forms in (whole, apart)]
        assert form.predict(2)[0].tolist() == pytest.approx(expected)


def test_the_fuller_kind_of_worker_decides_whether_it_fits():
    card = make_card()  # 141 GB of weights, 80 GB of memory
    space = make_apart((1, 1), (1, 1), prefill_gpus_per_worker=4)
    rows = [dict(space.config(0)), {**space.config(0), "prefill_gpus_per_worker": 1}]
    knobs = tuple(Knob(name, tuple(sorted({row[name] for row in rows}))) for name in rows[0])
    prediction = predict_space(card, space_from_rows(knobs, rows))
    assert (prediction.fits_N > 0.5).tolist() == [True, False]
    assert prediction.memory_gib_N[1] == pytest.approx(4 * prediction.memory_gib_N[0], rel=0.05)


def test_ranks_that_attend_apart_exchange_tokens_of_their_own_only():
    """Wide expert parallelism: with as many sequences for each rank, a step does not grow with the ranks."""
    card = make_card(MIXTRAL)
    steps = []
    for ranks, clients in ((4, 256.0), (8, 512.0)):
        space = make_space(tp=(ranks,), ep=(ranks,), dp_attention=(True,))
        parts = compute_parts(card, read_deployment(card, space), clients, INPUT, OUTPUT)
        steps.append(time_parts(parts, ZERO).step[0])
    assert steps[1] < 1.1 * steps[0]
    together = compute_parts(card, read_deployment(card, make_space(tp=(8,))), 512.0, INPUT, OUTPUT)
    assert parts.engine[0] < together.engine[0]
    assert np.all(parts.collectives < together.collectives)
