"""Objectives: arithmetic against examples worked by hand, and every mistake in a file named by its field."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cclsearch.content import list_content, shipped_root
from cclsearch.errors import TrialError, UserError
from cclsearch.score.objective import Objective, load_objective

# 16 accelerators, 0.5 s a step, 32 sequences of 1024 tokens: 65,536 tokens/s, 4,096 an accelerator; 8 accelerator-s a
# step of 32,768 tokens are 244.140625 accelerator-s a million tokens; 6,553.6 J a step are 200,000 J a million tokens.
METRICS = {
    "step_time_s": 0.5,
    "num_accelerators": 16.0,
    "tokens_per_s_per_accelerator": 4096.0,
    "accelerator_seconds_per_mtoken": 244.140625,
    "energy_j_per_mtoken": 200_000.0,
    "memory_headroom_frac": 0.04,
    "peak_memory_gib": 38.4,
}


def write(folder: Path, data: object, name: str = "own") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("spec", "loss"),
    [
        ("step_time", 0.5),
        ("throughput_per_accelerator", 1 / 4096),
        ("cost", 244.140625),
        ("cost:price_per_accelerator_hour=3.6", 0.244140625),
        ("energy", 200_000.0),
        # score 0.5 x 2/0.5 + 0.5 x 16/16 = 2.5
        ("composite:reference_step_time_s=2,reference_num_accelerators=16", 1 / 2.5),
        # score 0.25 x 2/0.5 + 0.75 x 64/16 = 4
        ("composite:weight=0.25,reference_step_time_s=2,reference_num_accelerators=64", 1 / 4),
        ("pareto", 0.5),
    ],
)
def test_a_shipped_objective_agrees_with_the_example_worked_by_hand(spec: str, loss: float) -> None:
    assert load_objective(spec).loss(METRICS) == pytest.approx(loss, rel=1e-12)


def test_every_shipped_objective_loads_and_says_what_it_is() -> None:
    shipped = {path.stem for path in (shipped_root() / "objectives").glob("*.yaml")}
    assert shipped == {"step_time", "throughput_per_accelerator", "cost", "energy", "composite", "pareto"}
    assert shipped <= set(list_content("objectives", ".yaml"))
    assert all(load_objective(name).description for name in shipped)


def test_the_baseline_scores_one_and_fills_the_open_references() -> None:
    composite = load_objective("composite:weight=0.3")
    assert composite.needs_baseline
    baseline = {"step_time_s": 2.0, "num_accelerators": 32.0}
    assert composite.score(baseline, baseline) == pytest.approx(1.0)
    # 0.3 x 2/0.5 + 0.7 x 32/16 = 2.6
    assert composite.score(METRICS, baseline) == pytest.approx(2.6)
    assert not composite.with_baseline(baseline).needs_baseline
    with pytest.raises(ValueError, match="baseline"):
        composite.score(METRICS)


def test_a_price_changes_the_unit() -> None:
    assert load_objective("cost").terms[0].unit == "accelerator-s/Mtoken"
    assert load_objective("cost:price_per_accelerator_hour=2").terms[0].unit == "money/Mtoken"


def test_an_objective_survives_its_own_spec_and_its_own_json() -> None:
    objective = load_objective("composite:weight=0.3,reference_num_accelerators=16")
    assert load_objective(objective.spec) == objective
    assert Objective.model_validate_json(objective.model_dump_json()) == objective


def test_pareto_turns_each_metric_so_that_less_is_better(tmp_path: Path) -> None:
    metrics = [
        {"name": "step_time_s", "direction": "minimize"},
        {"name": "tokens_per_s_per_accelerator", "direction": "maximize"},
        {"name": "memory_headroom_frac", "direction": "maximize"},
    ]
    objective = load_objective(write(tmp_path, {"version": 1, "metrics": metrics}))
    assert objective.is_multi
    assert objective.values(METRICS) == (0.5, 1 / 4096, -0.04)


def test_a_constraint_says_what_breaks_it(tmp_path: Path) -> None:
    data = {
        "version": 1,
        "metrics": [{"name": "step_time_s", "direction": "minimize"}],
        "constraints": [{"metric": "memory_headroom_frac", "at_least": 0.05}],
    }
    objective = load_objective(write(tmp_path, data))
    assert objective.broken_constraints(METRICS) == ("memory_headroom_frac must be at least 0.05 fraction; it is 0.04",)
    assert objective.broken_constraints({**METRICS, "memory_headroom_frac": 0.05}) == ()
    with pytest.raises(TrialError, match="memory_headroom_frac is needed by a constraint"):
        objective.broken_constraints({"step_time_s": 1.0})


def test_a_missing_metric_is_a_failure_with_its_reason() -> None:
    with pytest.raises(TrialError, match="energy_j_per_mtoken was not measured: no power was recorded"):
        load_objective("energy").loss({"step_time_s": 1.0})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_no_number_is_a_failure(value: float) -> None:
    with pytest.raises(TrialError, match="must be finite"):
        load_objective("step_time").loss({"step_time_s": value})


def test_a_weighted_metric_of_zero_is_a_failure_and_no_infinity() -> None:
    objective = load_objective("composite:reference_step_time_s=1,reference_num_accelerators=1")
    with pytest.raises(TrialError, match="above 0"):
        objective.loss({"step_time_s": 0.0, "num_accelerators": 1.0})


def test_a_figure_of_the_run_script_may_be_ranked_by(tmp_path: Path) -> None:
    metric = {"name": "stalls", "direction": "minimize", "source": "script"}
    objective = load_objective(write(tmp_path, {"version": 1, "metrics": [metric]}))
    assert objective.loss({"stalls": 0.0}) == 0.0
    with pytest.raises(TrialError, match=r"metrics\.stalls"):
        objective.loss({})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("composite:weight=2", "weight: must be at most 1; it is 2"),
        ("composite:weight=-0.1", "weight: must be at least 0"),
        ("composite:weight=nan", "weight: must be finite"),
        ("composite:weight=much", "weight: must be a number; it is 'much'"),
        ("composite:wait=0.3", "there is no parameter 'wait'; there are: weight"),
        ("composite:weight=0.3,,", "name:parameter=value"),
        ("composite:reference_step_time_s=0", "reference_step_time_s: must be above 0"),
        ("cost:price_per_accelerator_hour=baseline", "must be a number"),
        ("fastest", "there is no objective 'fastest'; there are: composite"),
    ],
)
def test_a_bad_parameter_is_named(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_objective(spec)


TIME = {"name": "step_time_s", "direction": "minimize"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"version": 1, "metrics": [{"name": "step_time_s"}]}, r"metrics\[0\]\.direction: is missing"),
        ({"version": 1, "metrics": [TIME | {"direction": "down"}]}, r"metrics\[0\]\.direction: .*'minimize'"),
        ({"version": 1, "metrics": [TIME | {"unit": "ms"}]}, r"metrics\[0\]\.unit: step_time_s is measured in 's'"),
        ({"version": 1, "metrics": [TIME | {"wait": 1}]}, r"metrics\[0\]\.wait: is no field"),
        ({"version": 1, "metrics": [TIME | {"weight": 1}]}, r"metrics\[0\]\.reference: is missing"),
        ({"version": 1, "metrics": [TIME | {"reference": 1}]}, r"metrics\[0\]\.reference: has a meaning only beside"),
        (
            {"version": 1, "metrics": [TIME | {"weight": 1, "reference": 0}]},
            r"metrics\[0\]\.reference: must be above 0",
        ),
        (
            {"version": 1, "metrics": [TIME | {"weight": float("nan"), "reference": 1}]},
            r"metrics\[0\]\.weight: .*finite",
        ),
        (
            {"version": 1, "metrics": [TIME | {"weight": -1, "reference": 1}]},
            r"metrics\[0\]\.weight: must be at least 0",
        ),
        ({"version": 1, "metrics": [TIME | {"weight": 0, "reference": 1}]}, "weights must add up"),
        ({"version": 1, "metrics": [TIME | {"weight": "len(x)", "reference": 1}]}, r"only numbers, parameters"),
        ({"version": 1, "metrics": [TIME | {"weight": "1 / 0", "reference": 1}]}, "no finite value"),
        ({"version": 1, "metrics": [TIME | {"weight": "w", "reference": 1}]}, "there is no parameter 'w'"),
        ({"version": 1, "metrics": [TIME | {"scale": -1}]}, r"metrics\[0\]\.scale: must be above 0"),
        ({"version": 1, "metrics": [TIME, TIME]}, "each may stand there once"),
        ({"version": 1, "metrics": []}, "metrics: "),
        ({"version": 1}, "metrics: is missing"),
        ({"version": 2, "metrics": [TIME]}, "version: "),
        ({"version": 1, "metrics": [TIME], "constraints": [{"metric": "mfu"}]}, "at_least"),
        (
            {"version": 1, "metrics": [TIME], "constraints": [{"metric": "mfu", "at_least": 2, "at_most": 1}]},
            "must not be above",
        ),
        ({"version": 1, "parameters": {"p": {"default": float("inf")}}, "metrics": [TIME]}, r"parameters\.p\.default"),
        ([1, 2], "mapping"),
        ("version: [", "own.yaml: "),
    ],
)
def test_a_mistake_in_a_file_is_named_by_its_field(tmp_path: Path, data: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_objective(write(tmp_path, data))
    assert "own.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mixture_of_weighted_and_unweighted_metrics_is_refused(tmp_path: Path) -> None:
    metrics = [TIME | {"weight": 1, "reference": 1}, {"name": "num_accelerators", "direction": "minimize"}]
    with pytest.raises(UserError, match=r"metrics\[1\]\.weight is missing"):
        load_objective(write(tmp_path, {"version": 1, "metrics": metrics}))


def test_more_than_three_metrics_need_weights(tmp_path: Path) -> None:
    names = ("step_time_s", "num_accelerators", "peak_memory_gib", "power_w")
    metrics = [{"name": name, "direction": "minimize"} for name in names]
    with pytest.raises(UserError, match="at most 3 metrics; there are 4"):
        load_objective(write(tmp_path, {"version": 1, "metrics": metrics}))


def test_a_loss_reads_back_as_the_figure_that_people_know() -> None:
    metrics = {"step_time_s": 2.0, "num_accelerators": 8.0, "tokens_per_s_per_accelerator": 400.0}
    for spec in ("step_time", "throughput_per_accelerator", "composite:weight=0.3"):
        objective = load_objective(spec)
        baseline = {"step_time_s": 3.0, "num_accelerators": 16.0}
        loss = objective.loss(metrics, baseline if objective.needs_baseline else None)
        score = objective.score(metrics, baseline if objective.needs_baseline else None)
        assert objective.read_loss(loss) == pytest.approx(score)
