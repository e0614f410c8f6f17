"""Policy programs: the published contract, the shipped seeds, and the errors for invalid programs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from llm.cases import CARD, SPACE, Search, plain_table, run_trial

from cclsearch.card.load import load_card
from cclsearch.card.model import MoEArch
from cclsearch.checks.policy import check_policy
from cclsearch.core.content import find_content, list_content
from cclsearch.core.trust import trust_project
from cclsearch.propose.agent.policy.inputs import policy_inputs
from cclsearch.propose.agent.policy.runner import SandboxRunner, read_choice
from cclsearch.propose.agent.policy.sandbox import run_policy
from cclsearch.propose.agent.prompt.surrogate_table import make_surrogate_table
from cclsearch.propose.base import SearchView
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework
from cclsearch.space.table import Knob, space_from_rows

PUBLISHED_FORM = '''
def generate_config(workload: dict, environment: dict) -> dict:
    """In the form of the programs that were published with the reference."""
    total_gpus = environment.get("total_gpus", 16)
    gpus_per_node = environment.get("gpus_per_node", 4)
    gpu_memory_gb = environment.get("gpu_memory_gb", 40)
    valid_choices = {}
    for dim in workload.get("config_space", []):
        valid_choices[dim["key"]] = dim["choices"]
    batch_size = workload.get("batch_size", 32)
    family = workload.get("model_family", "").lower()
    tp = max(c for c in sorted(valid_choices.get("tp", [1])) if c <= min(gpus_per_node, 4))
    pp = min(sorted(valid_choices.get("pp", [1, 2])), key=lambda x: abs(x - 2))
    dp = total_gpus // (tp * pp)
    micro_batch = 2 if batch_size % (dp * 2) == 0 and gpu_memory_gb > 0 and family is not None else 1
    assert workload["num_layers"] % pp == 0
    return {"tp": tp, "dp": dp, "pp": pp, "micro_batch": micro_batch, "activation_checkpointing": False,
            "compile_mode": "eager"}
'''


def choose(program: str, search: Search | None = None) -> object:
    return SandboxRunner().choose(program, (search or Search()).view, plain_table())


def test_a_program_of_the_published_form_runs_unchanged():
    choice = SandboxRunner().choose(PUBLISHED_FORM, Search().view, plain_table())
    assert choice.config is not None
    assert dict(choice.config) == {"tp": 4, "pp": 2, "dp": 2, "micro_batch_size": 2}
    assert choice.note == "left out: activation_checkpointing, compile_mode"


def test_inputs_contain_the_fields_of_published_programs():
    search = Search(observations=[run_trial(1, SPACE.config(0))])
    workload, environment, history = policy_inputs(search.view)
    knob = workload["config_space"][0]
    assert (knob["key"], knob["type"], knob["choices"]) == ("tp", "int", [1, 2, 4, 8, 16])
    assert set(knob) == {"key", "type", "choices", "description"}
    assert (workload["num_layers"], workload["batch_size"], workload["seq_len"]) == (32, 64, 4096)
    assert (environment["total_gpus"], environment["gpus_per_node"], environment["gpu_memory_gb"]) == (16, 8, 80.0)
    assert history[0]["status"] == "success"


def test_knobs_that_a_program_does_not_name_are_filled_in_and_noted():
    choice = SandboxRunner().choose("def generate_config(w, e):\n    return {'tp': 4}", Search().view, plain_table())
    assert choice.config["tp"] == 4
    assert choice.note.startswith("pp=")
    assert choice.note.endswith(" were added")


def test_boolean_means_the_full_and_none_of_a_framework():
    knobs = (Knob("tp", (1, 2)), Knob("activation_checkpointing", ("none", "full")))
    rows = [{"tp": tp, "activation_checkpointing": word} for tp in (1, 2) for word in ("none", "full")]
    space = space_from_rows(knobs, rows)
    choice = read_choice(space, {"tp": 2, "activation_checkpointing": True}, [])
    assert choice.config == {"tp": 2, "activation_checkpointing": "full"}
    assert read_choice(space, {"tp": True}, []).config is None


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("{'tp': 3}", "tp must be one of"),
        ("{'tp': 16, 'pp': 16}", "not in the search space"),
        ("{'compile': 'x'}", "named no knob"),
        ("{}", "named no knob"),
    ],
)
def test_a_wrong_choice_is_explained(returned, words):
    choice = SandboxRunner().choose(f"def generate_config(w, e):\n    return {returned}", Search().view, plain_table())
    assert choice.config is None
    assert words in choice.problem


@pytest.mark.parametrize("name", ["dense", "moe", "composite"])
def test_shipped_seeds_pick_a_configuration_that_the_card_allows(name):
    program = find_content("policies", name, ".py").read_text()
    choice = SandboxRunner().choose(program, Search().view, plain_table())
    assert choice.config is not None, choice.problem
    config = dict(choice.config)
    assert config["tp"] <= 8  # inside a node
    assert CARD.number("global_batch_size") % (config["dp"] * config["micro_batch_size"]) == 0  # type: ignore[operator]


def test_the_moe_seed_spreads_the_experts():
    moe = MoEArch(num_experts=64, top_k=6, expert_intermediate_size=1408)
    knobs = [{"key": "ep", "type": "int", "choices": [1, 2, 4, 8, 16], "description": ""}]
    knobs += [{"key": k, "type": "int", "choices": [1, 2, 4, 8, 16], "description": ""} for k in ("tp", "pp", "dp")]
    view = replace(Search().view, card=CARD.model_copy(update={"model": CARD.arch.model_copy(update={"moe": moe})}))
    workload, environment, _ = policy_inputs(view)
    workload |= {"config_space": knobs, "num_params": 16_000_000_000}
    program = find_content("policies", "moe", ".py").read_text()
    assert run_policy(program, workload, environment)["ep"] > 1


@pytest.mark.parametrize(
    ("name", "workloads"),
    [
        ("dense", ["tiny", "wl1", "wl2", "wl4"]),
        ("moe", ["tiny-moe", "wl3", "wl5", "wl6", "wl7"]),
        ("composite", ["wl3"]),
    ],
)
def test_shipped_seeds_pick_valid_configurations_that_likely_fit_the_shipped_cards(name, workloads):
    program = find_content("policies", name, ".py").read_text()
    for verdict in check_policy(program, workloads, use_fewer=name == "composite"):
        assert verdict.is_legal, verdict
        assert (verdict.fits or 0.0) >= 0.5, verdict


def test_policies_are_found_by_name():
    assert {"dense", "moe", "composite"} <= set(list_content("policies", ".py"))


def test_policy_test_reports_picks_and_rejections(tmp_path, cli):
    good = find_content("policies", "dense", ".py")
    out = cli.out(["policy", "test", str(good), "--workload", "wl2", "tiny"])
    assert "wl2: tp=" in out
    assert "in the search space, predicted P(fits)" in out
    trust_project(tmp_path)
    bad = tmp_path / "bad.py"
    bad.write_text("def generate_config(workload, environment):\n    return {'tp': 16, 'pp': 16, 'dp': 16}\n")
    out = cli.out(["policy", "test", str(bad), "--workload", "wl2"], 1)
    assert "rejected" in out
    assert "num_accelerators" in out


def test_policy_test_names_an_unknown_file_or_workload(cli):
    assert "there is no policy 'no-such-policy'" in cli.err(["policy", "test", "no-such-policy"])
    assert "wl99" in cli.err(["policy", "test", "dense", "--workload", "wl99"])


SPELLINGS_KNOBS = (
    Knob("tp", (1, 2, 4)),
    Knob("pp", (1, 2)),
    Knob("micro_batch_size", (1, 2)),
    Knob("activation_checkpointing", ("none", "full")),
    Knob("sequence_parallel", (False, True)),
    Knob("zero_stage", (0, 1)),
)
SPELLINGS_SPACE = space_from_rows(
    SPELLINGS_KNOBS,
    [
        dict(zip((knob.name for knob in SPELLINGS_KNOBS), row, strict=True))
        for row in itertools.product(*(knob.choices for knob in SPELLINGS_KNOBS))
    ],
)


@pytest.mark.parametrize(
    ("key", "value", "knob", "choice"),
    [
        ("tensor_parallel_size", 4, "tp", 4),
        ("tensor_model_parallel_size", "4", "tp", 4),
        ("Tensor-Parallel-Degree", 4.0, "tp", 4),
        ("TP", "4.0", "tp", 4),
        ("pipeline_parallel", 2, "pp", 2),
        ("pp_size", 2, "pp", 2),
        ("mbs", 2, "micro_batch_size", 2),
        ("micro-batch-size", 2, "micro_batch_size", 2),
        ("gradient_checkpointing", True, "activation_checkpointing", "full"),
        ("recompute", "FULL", "activation_checkpointing", "full"),
        ("activation_checkpointing", "off", "activation_checkpointing", "none"),
        ("sp", 1, "sequence_parallel", True),
        ("sequence_parallel", "yes", "sequence_parallel", True),
        ("zero", True, "zero_stage", 1),
    ],
)
def test_knob_is_found_by_names_and_values_of_other_frameworks(key, value, knob, choice):
    found = read_choice(SPELLINGS_SPACE, {key: value}, [])
    assert found.config is not None, found.problem
    assert found.config[knob] == choice
    assert type(found.config[knob]) is type(choice)
    assert "left out" not in found.note


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"tp": True}, "tp must be one of [1, 2, 4]; got True"),
        ({"tensor_parallel": 3}, "tp must be one of [1, 2, 4]; got 3 (as 'tensor_parallel')"),
        ({"tp": 2, "tensor_parallel": 4}, "tp is given twice, as 2 and as 4"),
        ({"activation_checkpointing": "inductor"}, "activation_checkpointing must be one of"),
        ({"sequence_parallel": 2}, "sequence_parallel must be one of"),
    ],
)
def test_unknown_value_is_refused_with_the_choices(returned, words):
    found = read_choice(SPELLINGS_SPACE, returned, [])
    assert found.config is None
    assert words in found.problem


def test_policy_test_lets_a_policy_use_fewer_accelerators_when_asked(tmp_path, cli):
    trust_project(tmp_path)
    file = tmp_path / "few.py"
    file.write_text("def generate_config(workload, environment):\n    return {'tp': 4, 'dp': 1, 'pp': 1}\n")
    assert "num_accelerators" in cli.out(["policy", "test", str(file), "--workload", "wl2"], 1)
    assert "wl2: tp=4 dp=1 pp=1" in cli.out(["policy", "test", str(file), "--workload", "wl2", "--use-fewer"])


def test_rows_that_the_surrogate_does_not_rank_have_a_predicted_probability_to_fit():
    """Of a large space the surrogate ranks a part; the others do not count as configurations that cannot fit."""
    card = load_card("wl3")
    space = build_space(card, load_framework(card.framework), use_fewer=True)
    table = make_surrogate_table(SearchView(card, space, (), frozenset(), budget_left=1, seed=0))
    others = np.isnan(table.value_N)
    assert 0 < others.sum() < len(space)
    assert (table.fits_N[others] > 0.5).any(), "0 of all of them would refuse what an LLM or a policy proposes"
    assert np.isfinite(table.memory_gib_N).all()


def test_a_policy_for_another_task_is_rejected_in_one_line():
    (verdict,) = check_policy("def generate_config(w, e):\n    return {'tp': w['batch_size']}\n", ["tiny-serving"])
    assert verdict.reasons == ("the program reads 'batch_size', which a card of task 'serving' does not have",)
