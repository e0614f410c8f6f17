"""Objectives: arithmetic against examples computed by hand, and each mistake in a file named by its field."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from cclsearch.core.content import list_content, shipped_root
from cclsearch.core.errors import TrialError, UserError
from cclsearch.core.metrics import Direction
from cclsearch.scoring.objective import Constraint, Objective, Term, choose_objective, load_objective, split_spec

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
def test_a_shipped_objective_matches_the_example_computed_by_hand(spec, loss):
    assert load_objective(spec).loss(METRICS) == pytest.approx(loss, rel=1e-12)


def test_every_shipped_objective_loads_and_has_a_description():
    shipped = {path.stem for path in (shipped_root() / "objectives").glob("*.yaml")}
    assert shipped == {
        *("step_time", "throughput_per_accelerator", "cost", "energy", "composite", "pareto"),
        *("serving_pareto", "goodput", "fewest_accelerators"),
    }
    assert shipped <= set(list_content("objectives", ".yaml"))
    assert all(load_objective(name).description for name in shipped)


def test_the_baseline_scores_one_and_fills_the_open_references():
    composite = load_objective("composite:weight=0.3")
    assert composite.needs_baseline
    baseline = {"step_time_s": 2.0, "num_accelerators": 32.0}
    assert composite.score(baseline, baseline) == pytest.approx(1.0)
    # 0.3 x 2/0.5 + 0.7 x 32/16 = 2.6
    assert composite.score(METRICS, baseline) == pytest.approx(2.6)
    assert not composite.with_baseline(baseline).needs_baseline
    with pytest.raises(ValueError, match="baseline"):
        composite.score(METRICS)


def test_an_objective_survives_a_round_trip_through_spec_and_json():
    objective = load_objective("composite:weight=0.3,reference_num_accelerators=16")
    assert load_objective(objective.spec) == objective
    assert Objective.model_validate_json(objective.model_dump_json()) == objective


def test_pareto_converts_each_metric_so_that_less_is_better(tmp_path):
    objective = own_objective(tmp_path, TIME, THROUGHPUT, HEADROOM)
    assert objective.is_multi
    assert objective.values(METRICS) == (0.5, 1 / 4096, -0.04)


def test_a_message_names_the_objective_or_the_constraint_that_needs_a_metric():
    bounds = (Constraint(metric="mfu", at_least=0.3), Constraint(metric="step_time_s", at_most=2))
    objective = load_objective("step_time").model_copy(update={"constraints": bounds})
    assert objective.what_needs("step_time_s") == "--objective step_time", "also if a constraint bounds it"
    assert objective.what_needs("mfu") == "constraint 'mfu >= 0.3'"
    assert objective.what_needs("other") == "--objective step_time"


def test_a_missing_metric_is_a_failure_with_its_reason():
    with pytest.raises(TrialError, match="energy_j_per_mtoken was not measured: no power was recorded"):
        load_objective("energy").loss({"step_time_s": 1.0})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_a_number_is_a_failure(value):
    with pytest.raises(TrialError, match="must be finite"):
        load_objective("step_time").loss({"step_time_s": value})


def test_a_weighted_metric_of_zero_is_a_failure_not_infinity():
    objective = load_objective("composite:reference_step_time_s=1,reference_num_accelerators=1")
    with pytest.raises(TrialError, match="above 0"):
        objective.loss({"step_time_s": 0.0, "num_accelerators": 1.0})


def test_a_metric_of_the_run_script_can_be_an_objective(tmp_path):
    stalls = {"name": "stalls", "direction": "minimize", "source": "script"}
    objective = own_objective(tmp_path, stalls)
    assert objective.loss({"stalls": 0.0}) == 0.0
    with pytest.raises(TrialError, match=r"metrics\.stalls"):
        objective.loss({})
    assert objective.score_label == "stalls"
    assert own_objective(tmp_path, stalls | {"unit": "1/s"}).score_label == "stalls (1/s)"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("composite:weight=2", "weight: must be at most 1; it is 2"),
        ("composite:weight=-0.1", "weight: must be at least 0"),
        ("composite:weight=nan", "weight: must be a finite number"),
        ("composite:weight=much", "weight: must be a finite number; it is 'much'"),
        ("composite:wait=0.3", r"there is no parameter 'wait' \(did you mean 'weight'\?\); known: weight"),
        ("composite:weight=0.3,,", "name:parameter=value"),
        ("composite:reference_step_time_s=0", "reference_step_time_s: must be above 0"),
        ("cost:price_per_accelerator_hour=baseline", "must be a number"),
        ("fastest", "there is no objective 'fastest'; known: composite"),
    ],
)
def test_a_bad_parameter_is_named(spec, message):
    with pytest.raises(UserError, match=message):
        load_objective(spec)


TIME = {"name": "step_time_s", "direction": "minimize"}
SIZE = {"name": "num_accelerators", "direction": "minimize"}
FOUR = [{"name": name, "direction": "minimize"} for name in ("mfu", "num_accelerators", "peak_memory_gib", "power_w")]


def of(*metrics: dict[str, object], **fields: object) -> dict[str, object]:
    """Return the content of an objective's file."""
    return {"version": 1, "metrics": list(metrics), **fields}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (of({"name": "step_time_s"}), r"metrics\[0\]\.direction: is missing"),
        (of(TIME | {"direction": "down"}), r"metrics\[0\]\.direction: .*'minimize'"),
        (of(TIME | {"unit": "ms"}), r"metrics\[0\]\.unit: step_time_s is measured in 's'"),
        (of(TIME | {"wait": 1}), r"metrics\[0\]\.wait: is not a field of an objective"),
        (of(TIME | {"weight": 1}), r"metrics\[0\]\.reference: is missing"),
        (of(TIME | {"reference": 1}), r"metrics\[0\]\.reference: is allowed only together with"),
        (of(TIME | {"weight": 1, "reference": 0}), r"metrics\[0\]\.reference: must be above 0"),
        (of(TIME | {"weight": float("nan"), "reference": 1}), r"metrics\[0\]\.weight: .*finite"),
        (of(TIME | {"weight": -1, "reference": 1}), r"metrics\[0\]\.weight: must be at least 0"),
        (of(TIME | {"weight": 0, "reference": 1}), "weights must add up"),
        (of(TIME | {"weight": "len(x)", "reference": 1}), r"only numbers, parameters"),
        (of(TIME | {"weight": "1 / 0", "reference": 1}), "no finite value"),
        (of(TIME | {"weight": "w", "reference": 1}), "there is no parameter 'w'"),
        (of(TIME | {"weight": 1, "reference": 1}, SIZE), r"metrics\[1\]\.weight is missing"),
        (of(TIME | {"scale": -1}), r"metrics\[0\]\.scale: must be above 0"),
        (of(TIME | {"scale": 0}), r"metrics\[0\]\.scale: must be above 0; it is 0"),
        (of(TIME, TIME), "metric names must be unique"),
        (of(*FOUR), "at most 3 metrics; there are 4"),
        (of(), "metrics: "),
        ({"version": 1}, "metrics: is missing"),
        (of(TIME, version=2), "version: "),
        (of(TIME, constraints=[{"metric": "mfu"}]), r"constraints\[0\]: needs `at_least` or `at_most`"),
        (of(TIME, constraints=[{"metric": "mfu", "at_least": 2, "at_most": 1}]), "must not be above"),
        (of(TIME, parameters={"p": {"default": float("inf")}}), r"parameters\.p\.default"),
        ([1, 2], "mapping"),
        ("version: [", "own.yaml: "),
    ],
)
def test_a_mistake_in_a_file_is_named_by_its_field(tmp_path, data, message):
    with pytest.raises(UserError, match=message) as caught:
        load_objective(write(tmp_path, data))
    assert "own.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loss_converts_back_to_the_displayed_score():
    metrics = {"step_time_s": 2.0, "num_accelerators": 8.0, "tokens_per_s_per_accelerator": 400.0}
    for spec in ("step_time", "throughput_per_accelerator", "composite:weight=0.3"):
        objective = load_objective(spec)
        baseline = {"step_time_s": 3.0, "num_accelerators": 16.0}
        loss = objective.loss(metrics, baseline if objective.needs_baseline else None)
        score = objective.score(metrics, baseline if objective.needs_baseline else None)
        assert objective.score_from_loss(loss) == pytest.approx(score)


def own_objective(folder: Path, *metrics: dict[str, object], **fields: object) -> Objective:
    return load_objective(write(folder, of(*metrics, **fields)))


THROUGHPUT = {"name": "tokens_per_s_per_accelerator", "direction": "maximize"}
HEADROOM = {"name": "memory_headroom_frac", "direction": "maximize"}


def test_a_weighted_metric_is_divided_by_its_reference_in_the_scaled_unit(tmp_path):
    # 0.5 s is 500 ms: 0.25 x 1000/500 = 0.5; 4096 tokens/s are 4.096 k: 0.75 x 4.096/8.192 = 0.375
    objective = own_objective(
        tmp_path,
        TIME | {"weight": 0.25, "reference": 1000, "scale": 1000, "scaled_unit": "ms"},
        THROUGHPUT | {"weight": 0.75, "reference": 8.192, "scale": 0.001, "scaled_unit": "k tokens/s"},
    )
    assert objective.score(METRICS) == pytest.approx(0.875)
    assert objective.loss(METRICS) == pytest.approx(1 / 0.875)
    assert load_objective("composite").score_label == "composite score"


def test_a_baseline_reference_is_scaled_like_its_metric(tmp_path):
    # the baseline's 1 s is 1000 ms: 1000/500 = 2; a reference that the file gives stays: 3 x 4096/8192 = 1.5
    objective = own_objective(
        tmp_path,
        TIME | {"weight": 1, "reference": "baseline", "scale": 1000, "scaled_unit": "ms"},
        THROUGHPUT | {"weight": 3, "reference": 8192},
    )
    baseline = {"step_time_s": 1.0, "tokens_per_s_per_accelerator": 1.0}
    assert objective.score(METRICS, baseline) == pytest.approx(3.5)


def test_a_score_of_zero_cannot_be_ranked(tmp_path):
    objective = own_objective(tmp_path, HEADROOM | {"weight": 1, "reference": 0.5})
    assert objective.loss({"memory_headroom_frac": 0.25}) == pytest.approx(2.0)
    with pytest.raises(TrialError, match="the score must be above 0 to be ranked; it is 0"):
        objective.loss({"memory_headroom_frac": 0.0})


def test_a_single_metric_is_displayed_in_its_scaled_unit(tmp_path):
    cost = load_objective("cost:price_per_accelerator_hour=3.6")
    assert cost.score(METRICS) == pytest.approx(0.244140625)
    assert cost.score_label == "accelerator_seconds_per_mtoken (money/Mtoken)"
    throughput = own_objective(tmp_path, THROUGHPUT | {"scale": 0.001, "scaled_unit": "k tokens/s"})
    assert throughput.score(METRICS) == pytest.approx(4.096)
    assert throughput.loss(METRICS) == pytest.approx(1 / 4.096)


def test_a_metric_that_may_be_negative_is_negated(tmp_path):
    objective = own_objective(tmp_path, HEADROOM)
    assert objective.loss(METRICS) == pytest.approx(-0.04)
    assert objective.score_from_loss(-0.04) == pytest.approx(0.04)


def test_a_term_with_defaults_uses_the_metric_unchanged():
    low, high = (Term(metric="stalls", direction=way, unit=None) for way in Direction)
    assert (low.minimized(2.0), high.minimized(2.0)) == (2.0, -2.0)
    assert (low.restored(2.0), high.restored(-2.0)) == (2.0, 2.0)


def test_only_several_metrics_without_weights_are_a_pareto_objective(tmp_path):
    weighted = [TIME | {"weight": 1, "reference": 1}, THROUGHPUT | {"weight": 1, "reference": 1}]
    assert not own_objective(tmp_path, TIME).is_multi
    assert not own_objective(tmp_path, *weighted).is_multi
    front = own_objective(tmp_path, TIME, THROUGHPUT)
    assert front.is_multi
    assert front.score_label == "step_time_s (s)"
    assert front.metrics == ("step_time_s", "tokens_per_s_per_accelerator")


def test_the_bounds_of_a_constraint_are_inclusive(tmp_path):
    between = {"metric": "peak_memory_gib", "at_least": 10, "at_most": 30}
    objective = own_objective(tmp_path, TIME, constraints=[between])
    messages = {
        9.5: ("peak_memory_gib must be at least 10 GiB; it is 9.5",),
        30.5: ("peak_memory_gib must be at most 30 GiB; it is 30.5",),
    }
    for gib in (9.5, 10.0, 30.0, 30.5):
        assert objective.broken_constraints({"peak_memory_gib": gib}) == messages.get(gib, ())
    with pytest.raises(TrialError, match="peak_memory_gib is needed for a constraint"):
        objective.broken_constraints({"step_time_s": 1.0})
    exact = own_objective(tmp_path, TIME, constraints=[between | {"at_least": 30}])
    assert exact.broken_constraints({"peak_memory_gib": 30.0}) == ()


def test_a_constraint_may_use_a_metric_of_the_run_script(tmp_path):
    own = {"metric": "stalls", "at_most": 3, "source": "script", "unit": "stalls"}
    objective = own_objective(tmp_path, TIME, constraints=[own])
    assert objective.broken_constraints({"stalls": 4.0}) == ("stalls must be at most 3 stalls; it is 4",)
    with pytest.raises(UserError, match="there is no metric 'stalls'"):
        own_objective(tmp_path, TIME, constraints=[{"metric": "stalls", "at_most": 3}])


@pytest.mark.parametrize(
    ("spec", "name", "given"),
    [
        ("composite", "composite", {}),
        ("composite:weight=0.3, reference_num_accelerators = 16", "composite",
         {"weight": "0.3", "reference_num_accelerators": "16"}),
        ("odd:name", "odd:name", {}),
        ("weight=0.3", "weight=0.3", {}),
    ],
)  # fmt: skip
def test_a_spec_is_a_name_and_parameters_after_a_colon(spec, name, given):
    assert split_spec(spec) == (name, given)


@pytest.mark.parametrize("rest", ["weight=", "=0.3", "weight=0.3,scale"])
def test_an_incomplete_parameter_is_rejected(rest):
    with pytest.raises(UserError, match=r"objective parameters are written `name:parameter=value,\.\.\.`"):
        split_spec(f"composite:{rest}")


@pytest.mark.parametrize("weight", [0, 1])
def test_a_parameter_may_equal_its_bound(weight):
    assert load_objective(f"composite:weight={weight}").terms[0].weight == weight


def test_a_mistake_shows_at_most_eighty_characters_of_the_value(tmp_path):
    for size, shown in ((78, repr("d" * 78)), (79, "'" + "d" * 78 + "…")):
        with pytest.raises(UserError) as caught:
            own_objective(tmp_path, TIME | {"direction": "d" * size})
        assert str(caught.value).partition("; it is ")[2] == shown


def test_an_objective_is_frozen():
    with pytest.raises(ValidationError):
        load_objective("step_time").name = "other"


@pytest.mark.parametrize("text", ["mfu >= 30%", "mfu >= 30 %", "mfu>=30.0%", "mfu >= 0.3"])
def test_a_bound_on_a_fraction_may_be_in_percent(text):
    [constraint] = choose_objective("step_time", (text,), task="training").constraints
    assert constraint.at_least == pytest.approx(0.3)
    assert constraint.unit == "fraction" or constraint.unit is None


@pytest.mark.parametrize("text", ["step_time_s <= 30%", "mfu >= 30 percent", "peak_memory_gib <= 90%"])
def test_percent_of_anything_else_is_refused(text):
    with pytest.raises(UserError, match="is measured in '"):
        choose_objective("step_time", (text,), task="training")
