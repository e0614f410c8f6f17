"""Measured kernels of aiconfigurator's tables as a prior of serving predictions: `make test-frameworks`."""

from __future__ import annotations

import numpy as np
import pytest
from packages import needs
from test_frameworks import HOW
from test_kernel_tables import ASKED, check_refused, make_card

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import Predictor
from cclsearch.tasks.base import task_of
from cclsearch.tasks.serving.closed_form.kernel_tables import MAX_ESTIMATES, ServedLayout, estimate_latencies
from cclsearch.tasks.serving.closed_form.steps import TPOT, TTFT

pytestmark = needs("aiconfigurator", HOW)


def make_space(**choices: tuple[int | str, ...]) -> Space:
    names = list(choices)
    rows = [dict(zip(names, values, strict=True)) for values in zip(*choices.values(), strict=True)]
    return space_from_rows(tuple(Knob(name, tuple(sorted(set(choices[name])))) for name in names), rows)


def predict(card: Card, space: Space) -> dict[str, np.ndarray]:
    predictor = task_of(card).predictor(card, space)
    assert isinstance(predictor, Predictor)
    return {name: np.exp(predictor.forms[name].predict(len(space))[0]) for name in (TPOT, TTFT)}


def test_a_device_without_tables_is_refused_in_one_line():
    check_refused((ASKED, "accelerator=tpu-v6e"), "has no tables of 'tpu-v6e', only of")


def test_a_model_that_would_have_to_be_downloaded_is_refused():
    check_refused((ASKED,), "does not know the model 'qwen3-4b'", workload="wl1-inference")


def test_too_many_estimates_are_refused_before_the_first():
    layouts = [ServedLayout("vllm", "bf16", 1, 1, 1, 1, batch) for batch in range(1, MAX_ESTIMATES + 2)]
    with pytest.raises(UserError, match=f"needs {MAX_ESTIMATES + 1} estimates"):
        estimate_latencies(make_card(ASKED), layouts, (1024, 256))


def test_predicted_latencies_are_between_the_closed_form_and_measured_kernels():
    space = make_space(tp=(1, 2, 4), dp=(4, 2, 1))
    alone, both = predict(make_card(), space), predict(make_card(ASKED), space)
    layouts = [ServedLayout("vllm", "bf16", tp, 1, 1, 1, batch) for tp, batch in ((1, 4), (2, 8), (4, 16))]
    kernels = estimate_latencies(make_card(ASKED), layouts, (1024, 256))
    assert np.isfinite(kernels).all()
    assert (np.diff(kernels[:, 1]) < 0).all(), "more ranks share a token's work"
    assert both[TPOT] == pytest.approx(np.sqrt(alone[TPOT] * kernels[:, 1]))
    assert both[TTFT] == pytest.approx(np.sqrt(alone[TTFT] * kernels[:, 0]))


def test_an_engine_without_tables_keeps_the_closed_form():
    space = make_space(engine=("vllm", "llama.cpp"), tp=(1, 1))
    alone, both = predict(make_card(), space), predict(make_card(ASKED), space)
    other = space.column("engine") == "llama.cpp"
    assert both[TPOT][other] == pytest.approx(alone[TPOT][other])
    assert both[TPOT][~other] != pytest.approx(alone[TPOT][~other])
