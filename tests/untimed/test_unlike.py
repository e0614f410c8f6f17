"""Unlike hardware in one job, and uneven pipeline stages: predicted, refused, rendered, and really trained."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from test_run_script_options import load_script
from trials import DENSE, make_input, run_script

from cclsearch.card.load import card_from_mapping, load_card
from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.content import find_content
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.core.yaml_file import read_yaml
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.tasks.base import task_of
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.measurements import find_mfu
from cclsearch.tasks.training.network import Network
from cclsearch.tasks.training.staged import find_layers
from cclsearch.tasks.training.stages import shift_layers, split_layers

MIXED = [
    {"accelerator": "h100", "num_accelerators": 8, "accelerators_per_node": 8},
    {"accelerator": "a100-40", "num_accelerators": 8, "accelerators_per_node": 4},
]


def card_of(groups: list[dict[str, Any]], name: str = "wl2", **hardware: Any) -> Card:
    data = read_yaml(find_content("workloads", name, ".yaml"))
    data["workload"]["hardware"] = {"groups": groups, **hardware}
    return card_from_mapping(data, name)


def step_s(card: Card, *configs: dict[str, Any]) -> np.ndarray:
    knobs = [Knob(name, tuple(dict.fromkeys(config[name] for config in configs))) for name in configs[0]]
    predictor = task_of(card).predictor(card, space_from_rows(knobs, list(configs)))
    return np.exp(predictor.forms["step_time_s"].predict(len(configs))[0])


def gib(card: Card, *configs: dict[str, Any]) -> np.ndarray:
    knobs = [Knob(name, tuple(dict.fromkeys(config[name] for config in configs))) for name in configs[0]]
    memory = task_of(card).predictor(card, space_from_rows(knobs, list(configs))).memory
    return np.exp(memory.form.predict(len(configs))[0])


def base(**knobs: Any) -> dict[str, Any]:
    return {"tp": 4, "dp": 2, "pp": 2, "micro_batch_size": 1, "stage_layers": "even"} | knobs


def test_the_split_by_speed_is_the_best_of_all_splits():
    draw = random.Random(5)
    for _ in range(200):
        stages = draw.randint(2, 4)
        layers, micro = draw.randint(stages, 11), draw.randint(1, 16)
        each = [draw.choice([1.0, 2.0, 0.5, draw.random() + 0.1]) for _ in range(stages)]
        extra = [0.0] * (stages - 1) + [draw.choice([0.0, 1.3, 5.0])]

        def step(split: tuple[int, ...]) -> float:
            times = [s * n + e for s, n, e in zip(each, split, extra, strict=True)]  # noqa: B023
            return sum(times) + (micro - 1) * max(times)  # noqa: B023

        every = [n for n in itertools.product(range(1, layers + 1), repeat=stages) if sum(n) == layers]
        assert step(split_layers(each, extra, layers, micro)) == pytest.approx(min(map(step, every)))


def test_neighbours_move_layers_between_the_fastest_and_the_slowest_stage():
    assert shift_layers((9, 3), (1.0, 2.5), 1) == (10, 2)
    assert shift_layers((9, 3), (1.0, 2.5), -2) == (7, 5)
    assert shift_layers((9, 3), (1.0, 2.5), 50) == (11, 1), "a stage keeps a layer"
    assert shift_layers((4, 4), (1.0, 1.0), 1) == (5, 3), "of equal stages: the first and the last"


def test_layers_follow_the_speed_of_the_devices():
    card, large = card_of(MIXED), base(micro_batch_size=8)
    split = find_layers(card, Config(large | {"stage_layers": "speed"}))
    assert sum(split) == 32
    assert split[0] > 1.5 * split[1], "an H100 computes more than an A100"
    choices = ("speed", "speed-1", "even", "4-28")
    seconds = step_s(card, *(large | {"stage_layers": choice} for choice in choices)).tolist()
    assert seconds[0] < 1.01 * min(seconds), "the neighbours are there because the split is decided before calibration"
    assert max(seconds[:2]) < 0.9 * seconds[2]
    assert seconds[2] < seconds[3]
    assert find_layers(card_of(MIXED[::-1]), Config(large | {"stage_layers": "speed"}))[0] < 14


def test_alike_groups_are_predicted_as_one():
    """But for the output projection, which is then on the last stage alone."""
    group = {"accelerator": "h100", "num_accelerators": 8, "accelerators_per_node": 8}
    mixed = card_of([group, group])
    hardware = mixed.hardware.model_copy(update={"groups": ()})
    alone = mixed.model_copy(update={"hardware": hardware})
    configs = [{**base(pp=pp, dp=dp)} for pp, dp in ((1, 4), (2, 2), (4, 1))]
    for config in configs:
        del config["stage_layers"]
    ours, theirs = step_s(mixed, *configs), step_s(alone, *configs)
    assert ours[0] == pytest.approx(theirs[0])
    assert ours == pytest.approx(theirs, rel=0.1)
    assert gib(mixed, configs[0]) == pytest.approx(gib(alone, configs[0]))


def test_memory_counts_by_the_device_of_each_stage():
    """Scaled to the first group's device: a stage on a device of half the memory counts twice."""
    small = [MIXED[0], {**MIXED[0], "memory_gib": 40}]
    equal = gib(card_of([MIXED[0], MIXED[0]]), base(stage_layers="4-28"))
    assert gib(card_of(small), base(stage_layers="4-28")) == pytest.approx(2 * equal)
    assert gib(card_of(small), base(stage_layers="28-4"))[0] < 1.5 * gib(
        card_of([MIXED[0]] * 2), base(stage_layers="28-4")
    )


def test_gradient_rings_stay_on_the_fast_network_where_stages_are_groups():
    """Holmes: between clusters only the pipeline's activations go over the slow links."""
    groups = [{**MIXED[0], "scale_out_gbps": 400, "outside_gbps": 10} for _ in range(2)]
    card = card_of(groups)
    inside = {"tp": 1, "dp": 8, "pp": 2, "micro_batch_size": 1, "rank_order": "tp-dp-pp"}
    across = inside | {"rank_order": "tp-pp-dp"}
    knobs = [Knob(name, tuple(dict.fromkeys((inside[name], across[name])))) for name in inside]
    layout = read_layout(card, space_from_rows(knobs, [inside, across]))
    rate = Network(layout, read_machine(card)).axis("sharding").bytes_s
    assert rate[1] < rate[0] / 10
    fast, slow = step_s(card, inside, across)
    assert slow > 1.5 * fast


def test_utilization_is_of_the_mean_peak_of_all_accelerators():
    alone = find_mfu(card_of([MIXED[0], MIXED[0]]), 1000.0)
    mixed = find_mfu(card_of(MIXED), 1000.0)
    assert alone is not None
    assert mixed == pytest.approx(alone * 989.4 / ((989.4 + 312) / 2), rel=1e-3)


@pytest.mark.parametrize(
    ("groups", "hardware", "message"),
    [
        ("h100", {}, "groups must be a list of"),
        ([{"accelerator": "h100"}], {}, "groups[0]: num_accelerators"),
        ([MIXED[0], {**MIXED[1], "accelerator": "a1000"}], {}, "groups[1]: there is no accelerator 'a1000'"),
        ([MIXED[0], {**MIXED[1], "speed": 1.5}], {}, "groups[1]: speed"),
        ([MIXED[0], {**MIXED[1], "speed": 0}], {}, "groups[1]: speed"),
        ([MIXED[0], {**MIXED[1], "num_accelerators": 2.5}], {}, "groups[1]: num_accelerators"),
        ([MIXED[0], {**MIXED[1], "colour": "red"}], {}, "groups[1]: colour"),
        (MIXED, {"xpu_spec": {"total_count": 12}}, "16 accelerators together, but 12 are stated"),
        (MIXED, {"xpu_spec": {"model": "a100-40"}}, "groups[0] is of h100, but the accelerator 'a100-40' is stated"),
        ([MIXED[0], {"accelerator": "tpu-v5e", "num_accelerators": 4}], {}, "TPUs and"),
    ],
)
def test_bad_groups_are_refused_in_one_line(groups, hardware, message):
    with pytest.raises(UserError) as error:
        card_of(groups, **hardware)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_choice_that_is_no_split_is_refused_in_one_line(cli):

    shown = cli.err(["predict", "-w", "tiny", "--knob", "stage_layers=fast"])
    assert "stage_layers must be even, speed, speed+1, speed-1, or the layers of each stage such as 5-3" in shown
    assert len(shown.strip().splitlines()) == 1


def test_illegal_splits_are_not_in_the_space():
    knob = KnobDeclaration(name="stage_layers", choices=("even", "3-1", "4-0", "2-1-1", "3-2", "speed"))
    space = build_space(load_card("tiny"), load_framework("cpu"), [knob])
    found = {(config["pp"], config["stage_layers"]) for config in map(space.config, range(len(space)))}
    assert found == {(1, "even"), (2, "even"), (2, "3-1"), (2, "speed"), (4, "even"), (4, "speed")}


def test_megatron_gets_the_layers_of_each_stage(monkeypatch):
    script = load_script("megatron", monkeypatch)
    option = "--pipeline-model-parallel-layout"
    assert script._pipeline({"pp": 3, "stage_layers": "speed"}, 32, (20, 8, 4)) == [option, "Et*20|t*8|t*4L"]
    assert script._pipeline({"pp": 2, "stage_layers": "speed"}, 32, (16, 16)) == []
    with pytest.raises(script.IllegalConfig, match="no layers of each stage"):
        script._pipeline({"pp": 2, "stage_layers": "speed"}, 32)
    with pytest.raises(script.IllegalConfig, match="do not split 32 layers"):
        script._pipeline({"pp": 2, "stage_layers": "speed"}, 32, (20, 8))


def test_ranks_are_given_their_layers_and_speeds():
    slow = {"accelerator": "cpu", "num_accelerators": 2, "memory_gib": 4, "speed": 0.25}
    card = card_of([{**slow, "speed": 1.0}, slow], "tiny")
    payload = task_of(card).make_input(
        card, Config(base(tp=1, stage_layers="speed", micro_batch_size=2)), is_measured=True, run_id="r", trial=1
    )
    assert payload.stage_layers == (3, 1)
    assert payload.rank_speeds == (1.0, 1.0, 0.25, 0.25)
    plain = load_card("tiny")
    assert (
        task_of(plain).make_input(plain, Config(base(tp=1)), is_measured=True, run_id="r", trial=1).stage_layers == ()
    )


def test_uneven_stages_on_ranks_of_unlike_speed_train_the_same_model(tmp_path):
    pytest.importorskip("torch")
    even = make_input({"pp": 2, "micro_batch_size": 2}, arch=DENSE)
    uneven = even.model_copy(update={"stage_layers": (3, 1), "rank_speeds": (1.0, 0.2)})
    first, second = run_script(tmp_path / "even", even), run_script(tmp_path / "uneven", uneven)
    assert second.losses == pytest.approx(first.losses, abs=1e-5)
    assert second.num_params == first.num_params
    with pytest.raises(AssertionError, match="do not split 4 layers"):
        run_script(tmp_path / "wrong", even.model_copy(update={"stage_layers": (3, 2)}))
