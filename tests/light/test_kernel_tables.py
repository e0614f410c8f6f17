"""Measured kernels as a prior of serving predictions: aiconfigurator's tables, asked for by a card."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.space.table import Knob, Space, space_from_rows
from cclsearch.stats.closed_form import Predictor
from cclsearch.tasks.base import task_of
from cclsearch.tasks.serving.kernel_tables import (
    MAX_ESTIMATES,
    ServedLayout,
    estimate_latencies,
    require_kernel_tables,
)
from cclsearch.tasks.serving.priors import TPOT, TTFT

needs_package = pytest.mark.skipif(importlib.util.find_spec("aiconfigurator") is None, reason="no aiconfigurator")
ASKED = "kernel_tables=aiconfigurator"
LOAD = ("task=serving", "input_len=1024", "output_len=256", "concurrency=16", "accelerator=nvidia_h100")


def make_card(*sets: str, workload: str = "wl2-inference") -> Card:
    card = load_card(workload, sets=[*LOAD, *sets])
    assert isinstance(card, Card)
    return card


def make_space(**choices: tuple[int | str, ...]) -> Space:
    names = list(choices)
    rows = [dict(zip(names, values, strict=True)) for values in zip(*choices.values(), strict=True)]
    return space_from_rows(tuple(Knob(name, tuple(sorted(set(choices[name])))) for name in names), rows)


def predict(card: Card, space: Space) -> dict[str, np.ndarray]:
    predictor = task_of(card).predictor(card, space)
    assert isinstance(predictor, Predictor)
    return {name: np.exp(predictor.forms[name].predict(len(space))[0]) for name in (TPOT, TTFT)}


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (("kernel_tables=nvidia",), "kernel_tables must be aiconfigurator; it is 'nvidia'"),
        pytest.param((ASKED, "accelerator=tpu-v6e"), "has no tables of 'tpu-v6e', only of", marks=needs_package),
    ],
)
def test_tables_that_cannot_be_had_are_refused_in_one_line(sets: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        require_kernel_tables(make_card(*sets))
    assert "\n" not in str(refused.value)


@needs_package
def test_a_model_that_would_have_to_be_downloaded_is_refused() -> None:
    with pytest.raises(UserError, match="does not know the model 'qwen3-4b'"):
        require_kernel_tables(make_card(ASKED, workload="wl1-inference"))


def test_without_the_package_the_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'ccl-search\[aiconfigurator\]'"):
        require_kernel_tables(make_card(ASKED))


@needs_package
def test_too_many_estimates_are_refused_before_the_first() -> None:
    layouts = [ServedLayout("vllm", "bf16", 1, 1, 1, 1, batch) for batch in range(1, MAX_ESTIMATES + 2)]
    with pytest.raises(UserError, match=f"needs {MAX_ESTIMATES + 1} estimates"):
        estimate_latencies(make_card(ASKED), layouts, (1024, 256))


@needs_package
def test_predicted_latencies_are_between_the_closed_form_and_measured_kernels() -> None:
    space = make_space(tp=(1, 2, 4), dp=(4, 2, 1))
    alone, both = predict(make_card(), space), predict(make_card(ASKED), space)
    layouts = [ServedLayout("vllm", "bf16", tp, 1, 1, 1, batch) for tp, batch in ((1, 4), (2, 8), (4, 16))]
    kernels = estimate_latencies(make_card(ASKED), layouts, (1024, 256))
    assert np.isfinite(kernels).all()
    assert (np.diff(kernels[:, 1]) < 0).all(), "more ranks share a token's work"
    assert both[TPOT] == pytest.approx(np.sqrt(alone[TPOT] * kernels[:, 1]))
    assert both[TTFT] == pytest.approx(np.sqrt(alone[TTFT] * kernels[:, 0]))


@needs_package
def test_an_engine_without_tables_keeps_the_closed_form() -> None:
    space = make_space(engine=("vllm", "llama.cpp"), tp=(1, 1))
    alone, both = predict(make_card(), space), predict(make_card(ASKED), space)
    other = space.column("engine") == "llama.cpp"
    assert both[TPOT][other] == pytest.approx(alone[TPOT][other])
    assert both[TPOT][~other] != pytest.approx(alone[TPOT][~other])
