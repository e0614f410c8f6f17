"""Workers that only prefill beside workers that only decode: what must hold of their prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_serving_prediction import LLAMA_70B, MIXTRAL, ZERO, make_card, make_space

from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import predict_space, predictor_of
from cclsearch.tasks.serving.closed_form.disaggregation import compute_parts, read_deployment
from cclsearch.tasks.serving.closed_form.steady_state import serve, time_parts

INPUT, OUTPUT = 1024.0, 256.0


def make_apart(*workers: tuple[int, int], **other: Any) -> Space:
    """One configuration for each pair of numbers of workers, all of four GPUs."""
    fixed = {"prefill_gpus_per_worker": 4, "decode_gpus_per_worker": 4, **other}
    rows = [{"prefill_workers": front, "decode_workers": back, **fixed} for front, back in workers]
    knobs = tuple(Knob(name, tuple(sorted({row[name] for row in rows}))) for name in rows[0])
    return space_from_rows(knobs, rows)


@pytest.mark.parametrize("clients", [1.0, 30.0, 2000.0])
@pytest.mark.parametrize("arch", [LLAMA_70B, MIXTRAL])
def test_every_client_is_somewhere_and_the_accelerators_are_counted_once(arch: dict[str, Any], clients: float) -> None:
    card, space = make_card(arch), make_apart((1, 1), (1, 4), (4, 1), (3, 2))
    at = read_deployment(card, space)
    parts = compute_parts(card, at, clients, INPUT, OUTPUT)
    served, times = serve(parts, ZERO), time_parts(parts, ZERO)
    assert at.accelerators.tolist() == [8, 20, 20, 20]
    requests_per_s = at.accelerators / served.cost / OUTPUT
    assert requests_per_s * (served.ttft_s + OUTPUT * served.tpot_s) == pytest.approx(clients, rel=1e-6), "Little's law"
    assert (requests_per_s <= parts.prefillers / times.prefill * (1 + 1e-9)).all(), "no more than can be prefilled"
    assert sum(served.parts.values()) == pytest.approx(served.cost)


def test_the_workers_that_set_the_rate_are_worth_more_and_the_others_nothing() -> None:
    card = make_card()
    at = read_deployment(card, make_apart((1, 4), (2, 4), (1, 8)))
    served = serve(compute_parts(card, at, 4000.0, INPUT, OUTPUT), ZERO)
    rate = at.accelerators / served.cost
    assert rate[1] / rate[0] == pytest.approx(2.0, rel=0.02)
    assert rate[2] == pytest.approx(rate[0])
    assert served.ttft_s[1] < served.ttft_s[0]


def test_prompts_of_others_do_not_slow_answers_down() -> None:
    card = make_card()
    apart = serve(compute_parts(card, read_deployment(card, make_apart((4, 1))), 64.0, INPUT, OUTPUT), ZERO)
    whole = serve(compute_parts(card, read_deployment(card, make_space(tp=(4,))), 64.0, INPUT, OUTPUT), ZERO)
    assert apart.tpot_s[0] < 0.9 * whole.tpot_s[0]


def test_both_kinds_of_servers_can_be_in_one_space() -> None:
    card = make_card(concurrency=32)
    mixed = make_apart((0, 1), (2, 1), tp=4, decode_ep=1)
    whole = predictor_of(card, make_space(tp=(4,))).forms
    apart = predictor_of(card, make_apart((2, 1))).forms
    for name, form in predictor_of(card, mixed).forms.items():
        expected = [float(forms[name].predict(1)[0][0]) for forms in (whole, apart)]
        assert form.predict(2)[0].tolist() == pytest.approx(expected)


def test_the_fuller_kind_of_worker_decides_whether_it_fits() -> None:
    card = make_card()  # 141 GB of weights, 80 GB of memory
    space = make_apart((1, 1), (1, 1), prefill_gpus_per_worker=4)
    rows = [dict(space.config(0)), {**space.config(0), "prefill_gpus_per_worker": 1}]
    knobs = tuple(Knob(name, tuple(sorted({row[name] for row in rows}))) for name in rows[0])
    prediction = predict_space(card, space_from_rows(knobs, rows))
    assert prediction is not None
    assert (prediction.fits_N > 0.5).tolist() == [True, False]
    assert prediction.memory_gib_N[1] == pytest.approx(4 * prediction.memory_gib_N[0], rel=0.05)


def test_ranks_that_attend_apart_exchange_tokens_of_their_own_only() -> None:
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
