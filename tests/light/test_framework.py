"""Framework files: found by alias, validated by field, with models and precisions that they cannot run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from paths import ROOT

from cclsearch.card.arch import count_adapters
from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.cli import main
from cclsearch.core.content import list_frameworks
from cclsearch.core.errors import UserError
from cclsearch.core.settings import Settings, load_settings
from cclsearch.core.values import Config
from cclsearch.core.yaml_file import validate_mapping
from cclsearch.launch.contract import DEVICES_VARIABLE
from cclsearch.launch.profile import load_profile, make_launcher
from cclsearch.launch.slurm.check import check_needs
from cclsearch.launch.slurm.job_files import RunScript
from cclsearch.launch.slurm.probe import read_needs
from cclsearch.plugins import TASKS
from cclsearch.space.build import build_space, explain_config
from cclsearch.space.framework import Framework, choose_framework, load_framework
from cclsearch.space.numbers import LIMITS
from cclsearch.space.promises import RequiredVariable
from cclsearch.space.rule import PARAMETERS, RULES, Clause, register_rule
from cclsearch.tasks.base import Task
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.training.layout import read_layout
from cclsearch.tasks.training.memory import memory_parts

OWN = """title: mine
aliases: [my-trainer]
knobs:
  - {name: tp, choices: [1, 2, 4]}
  - {name: dp, choices: {divisors_of: accelerators}}
  - {name: micro_batch_size, choices: [1, 2]}
  - {name: speed, choices: [slow, fast], env: MY_SPEED}
rules:
  - tp_divides_widths
  - {rule: implies, name: fast_needs_tp, when: {speed: fast}, then: {tp: [2, 4]}, because: it does}
"""


def write_framework(project: Path, text: str) -> None:
    (project / "launchers").mkdir(exist_ok=True)
    (project / "launchers" / "mine.framework.yaml").write_text(text)


@pytest.mark.parametrize("name", list_frameworks())
def test_shipped_frameworks_name_source_and_describe_their_knobs(name):
    framework = load_framework(name)
    knobs = (*framework.knobs, *framework.optional_knobs)
    assert framework.source
    assert all(knob.description for knob in knobs)
    assert len({knob.name for knob in knobs}) == len(knobs)
    assert not framework.script or bool(framework.same_losses.bounds) != bool(framework.same_losses.none)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        *((word, "megatron") for word in ("Megatron-LM", "megatron_lm", "megatron core", "NeMo", "Primus")),
        ("HF Trainer", "hf-trainer"),
        ("DeepSpeed ZeRO", "deepspeed"),
    ],
)
def test_a_framework_is_found_by_its_aliases(word, name):
    assert load_framework(word).name == name


def test_a_card_of_a_framework_without_a_run_script_names_those_that_run_on_its_accelerators():
    with pytest.raises(
        UserError, match=r"'torchxla', for which .* choose one that can run it with --framework \(maxtext\)"
    ):
        choose_framework(load_card("wl4", sets=["framework=torchxla", "accelerator=tpu-v5p", "memory_gb=95"]))


def test_adapters_are_the_work_and_only_some_frameworks_train_them():
    card = load_card("wl4", sets=["lora_rank=16", "base_precision=nf4", "batch_size=8"])
    with pytest.raises(UserError, match="cannot train adapters"):
        choose_framework(card, "megatron")
    card, framework = choose_framework(card, "hf-trainer")
    whole = card.model_copy(update={"model": card.arch.model_copy(update={"lora_rank": None, "base_precision": None})})
    space = build_space(card, framework)
    parts, of_whole = (memory_parts(each, read_layout(each, space), read_machine(each)) for each in (card, whole))
    adapters = count_adapters(card.arch)
    assert parts.optimizer.max() == pytest.approx(12 * adapters / 2**30, rel=0.01), "Adam's states of the adapters only"
    assert parts.weights.max() == pytest.approx(of_whole.weights.max() * 0.5625 / 2, rel=0.05), "4-bit weights"


def test_an_unknown_framework_lists_the_known_ones():
    with pytest.raises(
        UserError,
        match=r"no framework 'torchrun'.*; known: command, cpu, cpu-serving, deepspeed, gpu, hf-trainer, jax-cpu",
    ):
        load_framework("torchrun")


def test_a_project_may_add_a_framework(project):
    write_framework(project, OWN)
    framework = load_framework("My_Trainer")
    space = build_space(load_card("wl2"), framework)
    fast = space.column("speed") == "fast"
    assert set(space.column("tp")[fast].tolist()) == {2, 4}
    assert set(space.column("tp")[~fast].tolist()) == {1, 2, 4}
    assert framework.knob_environment({"speed": "fast", "tp": 2}) == {"MY_SPEED": "fast"}
    assert framework.knob_environment({"speed": "default"}) == framework.knob_environment({"tp": 2}) == {}
    with pytest.raises(UserError, match="has no run script"):
        _ = framework.script_path


WRONG = [
    ("tp_divides_widths", "tp_everywhere", r"there is no rule 'tp_everywhere' \(docs/rules\.md describes"),
    ("tp_divides_widths", "{rule: zero_limited_by_pp, most: true}", "most of .* must be a whole number"),
    ("tp_divides_widths", "{rule: tp_divides_widths, experts: 1}", "experts of .* must be true or"),
    ("tp_divides_widths", "{rule: tp_divides_widths, source: [a]}", "source of .* must be a text"),
    ("tp_divides_widths", "{rule: divides, name: x, number: heads}", "needs `name`, `knobs: .knob, ...."),
    ("tp_divides_widths", "{rule: divides, name: x, knobs: [tp], number: moons}", "there is no number 'moons'"),
    ("of: accelerators}", "of: accelerators, if_fewer: [moons]}", "there is no number 'moons'"),
    ("of: accelerators}", "of: accelerators, most: 0}", r"most.*greater than or equal to 1"),
    ("choices: [1, 2]}", "choices: [1, 2], if_at_least: {moons: 1}}", "there is no number 'moons'"),
    ("because: it does", "wherefore: it does", "no parameter wherefore; known: source, name, when"),
    ("when: {speed: fast}, ", "", "needs `name`, `when"),
    ("divisors_of: accelerators", "divisors_of: moons", "choices"),
    ("name: tp,", "name: TP,", r"knobs\.0\.name"),
    ("knobs:", "buttons:", "buttons: is not a known field"),
    ("env: MY_SPEED", "env: 'x; rm'", "env"),
    ("title: mine", "runner: mpi", "runner"),
    ("title: mine", "cannot: {big_models: buy more}", "there is no limit 'big_models'; known: experts, "),
    ("title: mine", "cannot: {experts: ' '}", "each limit needs one line"),
    ("title: mine", "records: [joy]", "records"),
    ("title: mine", "needs: [{env: 'a b', what: x}]", "needs"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_an_invalid_field_is_named_with_its_file(project, old, new, message):
    write_framework(project, OWN.replace(old, new))
    with pytest.raises(UserError, match=message) as caught:
        load_framework("mine")
    assert "mine.framework.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


class CachingTask(Task):
    """A task that a plugin could add: it has a number and a rule of its own."""

    name = "caching"
    metrics = ()
    rules = ("num_accelerators", "blocks_fit")
    numbers = MappingProxyType({"blocks": lambda card: card.number("blocks")})


CACHING = """title: mine
use_fewer: true
knobs:
  - {name: tp, choices: [1, 2, 4]}
  - {name: kv_blocks, choices: {divisors_of: blocks, most: 6}}
rules:
  - {rule: blocks_per_rank, least: 2}
"""


@pytest.fixture
def caching(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card of the task, whose rules and number are registered during the test."""
    load_card("wl2")  # loads the built-in tasks
    monkeypatch.setitem(TASKS._entries, "caching", CachingTask())
    for rule in ("blocks_fit", "blocks_per_rank"):
        monkeypatch.setitem(RULES, rule, lambda card, options: None)
        monkeypatch.setitem(PARAMETERS, rule, {})

    @register_rule("blocks_fit", "kv_blocks")
    def _blocks_fit(card: Card, options: Mapping[str, Any]) -> Clause:
        return "at most 4 blocks fit", lambda at: at["kv_blocks"] <= 4, lambda c: f"{c['kv_blocks']} blocks"

    @register_rule("blocks_per_rank", "kv_blocks", "tp", parameters={"least": int})
    def _blocks_per_rank(card: Card, options: Mapping[str, Any]) -> Clause:
        least = int(options["least"])
        return (
            f"at least {least} blocks per rank",
            lambda at: at["kv_blocks"] >= least * at["tp"],
            lambda c: f"{c['kv_blocks']} blocks on {c['tp']} ranks",
        )

    return load_card("wl2").model_copy(update={"task": "caching", "work": Config({"blocks": 12})})


def test_rules_and_numbers_of_a_plugins_task_work_in_a_projects_framework(project, caching):
    write_framework(project, CACHING)
    framework = load_framework("mine")
    space = build_space(caching, framework)
    assert space.rules == ("num_accelerators", "blocks_fit", "blocks_per_rank"), "none of training's rules"
    assert [(c["tp"], c["kv_blocks"]) for c in map(space.config, range(len(space)))] == [(1, 2), (1, 3), (1, 4), (2, 4)]
    rejected = [v for v in explain_config(caching, framework, {"tp": 2, "kv_blocks": 3}) if not v.ok]
    assert [(v.rule, v.summary, v.detail) for v in rejected] == [
        ("blocks_per_rank", "at least 2 blocks per rank", "3 blocks on 2 ranks")
    ]


def test_a_number_that_the_cards_task_does_not_have_is_refused(project, caching):
    write_framework(project, CACHING)
    with pytest.raises(UserError, match=r"wl2: a training workload has no number 'blocks'.*known: .*global_batch"):
        build_space(load_card("wl2"), load_framework("mine"))
    with pytest.raises(UserError, match="wl2 cannot run under megatron: its task is caching"):
        build_space(caching, load_framework("megatron"))
    write_framework(project, CACHING.replace("of: blocks", "of: moons"))
    with pytest.raises(UserError, match=r"no number 'moons'; known: accelerators, .*blocks, .*global_batch"):
        load_framework("mine")


LIMITED = """title: mine
script: mine.py
cannot:
  free_head_dim: use --framework megatron
  shared_experts: use --framework torchtitan
precisions: [bf16]
knobs:
  - {name: tp, choices: [1, 2, 4]}
  - {name: dp, choices: {divisors_of: accelerators}}
  - {name: micro_batch_size, choices: [1]}
"""
DRY_RUN = ("--launcher", "slurm-generic", "--dry-run")


def write_runnable(project: Path, text: str = LIMITED) -> None:
    write_framework(project, text)
    (project / "launchers" / "mine.py").write_text("")


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("wl1", "head_dim 128, and num_heads x head_dim is 4096, not the hidden size of 2560 (free_head_dim): use"),
        ("wl6", "model_arch.num_shared_experts 2 (shared_experts): use --framework torchtitan"),
    ],
)
def test_a_model_that_the_run_script_cannot_build_is_rejected_before_submission(project, cli, card, message):
    write_runnable(project)
    for command in (["run", *DRY_RUN], ["predict"], ["space"]):
        error = cli.err([*command, "--workload", card, "--framework", "mine"]).strip()
        assert message in error
        assert f"{card} cannot run under mine" in error
        assert "\n" not in error
    assert main(["run", "--workload", "wl2", "--framework", "mine", *DRY_RUN]) == 0


def test_a_precision_that_the_run_script_does_not_support_is_rejected(project):
    write_runnable(project)
    card = load_card("wl2", sets=("workload.model.precision=fp16",))
    with pytest.raises(UserError, match=r"workload\.model\.precision must be one of bf16, not 'fp16'"):
        build_space(card, load_framework("mine"))


DENSE, MOE = load_card("wl2").arch, load_card("wl5").arch


@pytest.mark.parametrize(
    ("limit", "base", "changes"),
    [
        ("free_head_dim", DENSE, {"head_dim": 64}),
        ("grouped_query", DENSE.model_copy(update={"num_kv_heads": 32}), {"num_kv_heads": 8}),
        ("ungated_mlp", DENSE, {"gated_mlp": False}),
        ("tied_embeddings", DENSE, {"tied_embeddings": True}),
        ("experts", DENSE, {"moe": MOE.moe}),
        ("shared_experts", DENSE, {"moe": MOE.moe}),
        ("dense_layers", DENSE, {"moe": MOE.moe}),
    ],
)
def test_a_limit_is_detected_in_the_model(limit, base, changes):
    assert LIMITS[limit].read(base) is None
    assert LIMITS[limit].read(base.model_copy(update=changes))
    assert LIMITS[limit].field.startswith("workload.model.")


def test_a_card_without_a_model_has_none_of_the_features_that_a_framework_cannot_build():
    card = load_card("wl2").model_copy(update={"model": None})
    limited = load_framework("megatron").model_copy(update={"cannot": {"experts": "use another"}, "precisions": ()})
    assert limited.require_buildable(card) is None


@pytest.mark.parametrize("name", [f"wl{n}" for n in range(1, 8)])
def test_every_shipped_card_names_a_framework_that_can_run_it(name):
    card = load_card(name)
    for framework in {card.framework, "megatron"}:
        load_framework(framework).require_buildable(card)
    assert load_framework(card.framework).script_path.is_file()


def test_an_energy_objective_needs_a_run_script_that_records_energy(project, cli):
    (project / "objectives").mkdir()
    limited = "metrics: [{name: step_time_s, direction: minimize}]\nconstraints: [{metric: power_w, at_most: 5000}]\n"
    (project / "objectives" / "cool.yaml").write_text(f"version: 1\n{limited}")
    write_runnable(project)
    search = ["run", "--workload", "wl2", *DRY_RUN]
    for objective, metric in (("energy", "energy_j_per_mtoken"), ("cool", "power_w")):
        for framework in ("maxtext", "mine"):
            error = cli.err([*search, "--framework", framework, "--objective", objective])
            assert f"needs {metric}, and the run script of framework '{framework}' records no energy_j" in error
    front = "{name: step_time_s, direction: minimize}, {name: energy_j_per_step, direction: minimize}"
    (project / "objectives" / "front.yaml").write_text(f"version: 1\nmetrics: [{front}]\n")
    sweep = ["sweep", *search[1:], "--framework", "mine", "--objective", "front"]
    assert "needs energy_j_per_step" in cli.err(sweep)
    write_runnable(project, LIMITED.replace("script:", "records: [energy_j]\nscript:"))
    for objective in ("energy", "cool"):
        assert main([*search, "--framework", "mine", "--objective", objective]) == 0
    assert main(sweep) == 0


def test_every_shipped_framework_but_that_of_tpus_declares_energy():
    """TPUs have no counter that a job can read, SGLang's are not read; the probe of links trains nothing."""
    without = {name for name in list_frameworks() if "energy_j" not in load_framework(name).records}
    assert without == {
        *("maxtext", "vllm-tpu", "sglang", "sglang-disagg", "trtllm", "links-probe", "links-probe-jax", "command")
    }


def test_required_variables_of_a_framework_are_checked_on_the_node(tmp_path, monkeypatch):
    needs = load_framework("megatron").needs
    assert [need.env for need in needs] == ["MEGATRON_PATH"]
    named = RunScript(path=tmp_path / "megatron.py", runner="torchrun", environment={}, needs=needs)
    unnamed = RunScript(path=None, runner="torchrun", environment={}, needs=needs)

    def check(program: RunScript) -> tuple[bool, str, str]:
        seen = read_needs([need.model_dump() for need in program.needs])
        [found] = check_needs(json.loads(json.dumps({"needs": seen})), program)
        return found.ok, found.detail, found.remedy

    monkeypatch.delenv("MEGATRON_PATH", raising=False)
    ok, detail, remedy = check(named)
    assert (ok, "not set" in detail) == (False, True)
    assert "set MEGATRON_PATH in the profile's `environment`" in remedy
    assert check(unnamed)[0], "only trials of that framework would miss it"
    monkeypatch.setenv("MEGATRON_PATH", str(tmp_path))
    assert [check(program)[0] for program in (named, unnamed)] == [False, False]
    (tmp_path / "pretrain_gpt.py").write_text("")
    assert check(named)[::2] == (True, "")


def test_a_required_variable_without_a_file_accepts_any_value(tmp_path):
    folder = RequiredVariable(env="MY_PATH", what="a folder of mine")
    holding = RequiredVariable(env="MY_PATH", what="a folder of mine", file="train.py")
    assert [folder.is_met(value) for value in ("/nowhere", None)] == [True, False]
    assert [holding.is_met(value) for value in (str(tmp_path), None)] == [False, False]
    (tmp_path / "train.py").write_text("")
    assert holding.is_met(str(tmp_path))
    assert folder.describe(None, is_met=False) == "not set; it names a folder of mine"
    assert holding.describe("/x", is_met=False) == "'/x' is not a folder of mine with train.py"
    assert holding.describe("/x", is_met=True) == "'/x' is a folder of mine with train.py"


def test_defaults_of_a_framework_file(project):
    write_framework(project, OWN.replace("of: accelerators}", "of: accelerators, most: 1}"))
    framework = load_framework("mine")
    assert (framework.runner, framework.forks_ranks, framework.use_fewer) == ("torchrun", False, False)
    assert not framework.knobs[0].moe_only
    assert framework.knobs[1].resolve(load_card("wl2")).choices == (1,)


@pytest.mark.parametrize(
    ("framework", "needs"),
    [("megatron", ["MEGATRON_PATH"]), (None, ["MEGATRON_PATH", "CCL_MODEL_PATH"]), ("torchtitan", [])],
)
def test_a_slurm_launcher_knows_what_its_framework_needs(framework, needs):
    launcher = make_launcher(load_profile("slurm-generic"), framework=framework)
    assert [need.env for need in launcher.run_script.needs] == needs


def test_the_local_launcher_is_checked_with_a_framework_and_without(monkeypatch, tmp_path, capsys, cli):
    monkeypatch.delenv("MEGATRON_PATH", raising=False)
    assert main(["launcher", "check", "local"]) == 0
    assert "NO  MEGATRON_PATH: not set" in cli.out(["launcher", "check", "local", "--framework", "megatron"], 1)
    monkeypatch.setenv("MEGATRON_PATH", str(tmp_path))
    (tmp_path / "pretrain_gpt.py").write_text("")
    main(["launcher", "check", "local", "--framework", "megatron"])
    assert "ok  MEGATRON_PATH" in capsys.readouterr().out
    assert main(["launcher", "list", "--framework", "megatron"]) == 2


def test_settings_are_defaults_without_a_file_or_with_an_empty_file(project):
    (project / "ccl-search.yaml").unlink()
    assert load_settings() == Settings()
    (project / "ccl-search.yaml").write_text("# nothing yet\n")
    assert load_settings() == Settings()
    (project / "ccl-search.yaml").write_text("launcher: perlmutter\nruns: searches\nbudget: 9\n")
    assert load_settings() == Settings(launcher="perlmutter", runs=Path("searches"), budget=9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("launchr: x\n", "launchr: is not a known field"),
        ("budget: 0\n", "budget"),
        ("version: 2\n", "version"),
        ("runs: ../elsewhere\n", "runs"),
        ("launcher: ''\n", "launcher"),
        ("- a\n", "must be a mapping"),
    ],
)
def test_invalid_settings_are_named_by_field(project, text, message):
    (project / "ccl-search.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_settings()


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"fp32": 1e-6, "bf16": "1e-3"}, ""),
        ({"none": "each rank draws its own data"}, ""),
        ({"none": ""}, "`none` needs a reason"),
        ({"none": "why", "fp32": 1e-6}, "`none` needs a reason, and no bounds beside it"),
        ({"fp32": 0}, "the bound of fp32 must be a deviation between 0 and 1"),
        ({"fp32": 2}, "the bound of fp32 must be a deviation between 0 and 1"),
        ({"bf16": "small"}, "same_losses.bounds.bf16"),
    ],
)
def test_a_framework_declares_how_closely_losses_agree(tmp_path, declared, message):
    fields = {"name": "mine", "knobs": [{"name": "tp", "choices": [1]}], "same_losses": declared}
    if message:
        with pytest.raises(UserError, match=re.escape(message)):
            validate_mapping(Framework, fields, "mine.framework.yaml")
        return
    bounds = validate_mapping(Framework, fields, "mine.framework.yaml").same_losses
    assert (bounds.bound("fp32"), bounds.bound("bf16")) == ((None, None) if "none" in declared else (1e-6, 1e-3))
    assert bounds.bound("fp8") is None
    assert bounds.none == declared.get("none", "")


def test_a_broken_framework_file_harms_only_those_that_name_it(project):
    (project / "launchers").mkdir()
    (project / "launchers" / "broken.framework.yaml").write_text("title: x\nscript: x.py\nrunner: process\nknobs: []\n")
    assert load_framework("megatron-lm").name == "megatron"
    assert load_framework("cpu").name == "cpu"
    with pytest.raises(UserError, match=r"broken\.framework\.yaml: knobs: must not be empty$"):
        load_framework("broken")


def test_no_knob_of_a_shipped_framework_sets_a_variable_of_the_trial_contract():
    """A knob `devices` would be the order of a rank's devices if that had its variable."""
    stated = {"CCL_TRIAL_DIR", "CCL_CONFIG", "CCL_NONCE", DEVICES_VARIABLE, "CCL_JOB_NAME", "CCL_TIMEOUT_S"}
    stated |= {"CCL_NUM_NODES", "CCL_PROCESS_ID", "CCL_NUM_PROCESSES", "CCL_COORDINATOR", "CCL_MODEL_PATH"}
    for path in sorted((ROOT / "launchers").glob("*.framework.yaml")):
        framework = load_framework(path.name.removesuffix(".framework.yaml"))
        for knob in (*framework.knobs, *framework.optional_knobs):
            assert f"CCL_{knob.name.upper()}" not in stated, f"{framework.name}: {knob.name}"


def test_what_a_framework_does_not_build_is_left_out_and_said():
    latent = {"kv_lora_rank": 64, "v_head_dim": 96, "qk_rope_head_dim": 32}
    card = load_card("wl2")
    features = {"qk_norm": True, "sliding_window": 128, "router_balance": "aux_loss", **latent}
    card = card.model_copy(update={"model": card.arch.model_copy(update=features)})
    fitted, _ = choose_framework(card, "megatron")
    assert fitted.arch == card.arch
    fitted, framework = choose_framework(card, "torchtitan")
    assert (fitted.arch.features, fitted.arch.head_dim, fitted.arch.v_head_dim) == (("qk_norm",), 96, None)
    (note,) = set(fitted.notes) - set(card.notes)
    assert note.startswith("differs from the card's model under torchtitan: no sliding windows, about ")
    assert "more time, predicted; no latent attention, " in note
    assert "no balance of the router (aux_loss), effect unknown" in note
    assert choose_framework(fitted, framework.name)[0] == fitted, "a resumed search says it once"
