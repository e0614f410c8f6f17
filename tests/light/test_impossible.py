"""What is called impossible before anything runs is not what the closed forms predict, for every shipped workload."""

from __future__ import annotations

import numpy as np
import pytest
from paths import ROOT

from cclsearch.card.load import load_card
from cclsearch.core.errors import UserError
from cclsearch.plan.forecast import describe_impossible, describe_no_room
from cclsearch.scoring.objective import Constraint, load_objective
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import predict_space, predictor_of
from cclsearch.tasks.training.measurements import find_mfu
from cclsearch.tasks.training.thresholds import DEFAULT

WORKLOADS = sorted(path.stem for path in (ROOT / "workloads").glob("*.yaml"))
FRAMEWORKS = ("jax-cpu", "maxtext", "megatron", "nanotron", "torchtitan")


def can_build(workload: str, framework: str) -> bool:
    """Whether the framework's run script can build the card's model."""
    try:
        load_framework(framework).require_buildable(load_card(workload))
    except UserError:
        return False
    return True


def predict_metrics(workload: str, framework: str) -> tuple[Space, dict[str, np.ndarray]]:
    """Return the search space, and metric -> (N,) what the closed forms predict."""
    card = load_card(workload)
    space = build_space(card, load_framework(framework))
    prediction = predict_space(card, space)
    assert prediction is not None
    rows = np.arange(len(space))
    found = {"step_time_s": prediction.value_N, "peak_memory_gib": prediction.memory_gib_N}
    for name, derived in predictor_of(card, space).derived.items():
        found[name] = derived.value(found[derived.base], rows)
    rates = found["tokens_per_s_per_accelerator"]
    mfu = [find_mfu(card, rate) for rate in rates.tolist()]
    if None not in mfu:
        found["mfu"] = np.array(mfu, dtype=float)
    return space, found | {"num_accelerators": space.num_accelerators_N}


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "gpu"])
def test_no_predicted_figure_is_called_impossible(framework):
    built = ["tiny-gpu"] if framework == "gpu" else [name for name in WORKLOADS if can_build(name, framework)]
    assert len(built) >= 3 or framework == "gpu"
    for workload in built:
        check_possible(workload, framework)


def check_possible(workload: str, framework: str) -> None:
    """Assert that no bound at the lowest or highest predicted value of a metric is called impossible."""
    space, predicted = predict_metrics(workload, framework)
    objective = load_objective("step_time")
    for metric, values in predicted.items():
        assert np.isfinite(values).all(), metric
        lowest, highest = float(values.min()), float(values.max())
        bounds = (Constraint(metric=metric, at_most=lowest), Constraint(metric=metric, at_least=highest))
        constrained = objective.model_copy(update={"constraints": bounds})
        assert describe_impossible(constrained, space, "training") == ()
        if metric == "mfu":
            assert highest <= DEFAULT.max_mfu, "the rule `possible` would refuse what the closed form predicts"


@pytest.mark.parametrize(("gib", "is_said"), [(2, True), (40, False)])
def test_a_model_that_no_device_holds_is_said_before_anything_runs(gib, is_said):
    card = load_card("wl1-inference", sets=[f"workload.hardware.xpu_spec.memory_gib={gib}"])
    said = describe_no_room(card, build_space(card, load_framework("vllm"), use_fewer=True))
    assert bool(said) == is_said
    assert not said or "the smallest needs about 2.89 GiB of each accelerator, which has 2 GiB" in said[0]
