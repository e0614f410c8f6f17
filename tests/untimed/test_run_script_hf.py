"""The run script `hf-trainer` trains the same work as `cpu`, and refuses what transformers and Accelerate cannot do."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_run_script_options import load_script
from trials import DENSE, MOE, make_input, run_script

from cclsearch.card.arch import count_parameters
from cclsearch.card.load import load_card
from cclsearch.card.model import ModelArch
from cclsearch.core.values import Value
from cclsearch.launch.contract import NONCE_MARK
from cclsearch.report.launch_form import make_launch
from cclsearch.space.build import build_space
from cclsearch.space.framework import load_framework

MIXTRAL = MOE.model_copy(
    update={"moe": MOE.moe and MOE.moe.model_copy(update={"num_shared_experts": 0, "num_dense_layers": 0})}
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("hf_trainer", monkeypatch)


def check_same_training(folder: Path, arch: ModelArch, config: dict[str, Value]) -> None:
    """Assert that it trains the same model on the same data as `cpu`; the tests of layouts assert through this."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    window = {"opens_window": True, "nonce": "a1b2"}
    for name in ("cpu", "hf"):
        (folder / name).mkdir()
        (folder / name / "window-1.nonce").write_text("123456789abc", encoding="utf-8")
    reference = run_script(folder / "cpu", make_input({"micro_batch_size": 8}, arch=arch).model_copy(update=window))
    payload = make_input(config, arch=arch, profiled_steps=2)
    payload = payload.model_copy(update={**window, "accelerator": "cpu"})
    result = run_script(folder / "hf", payload, script="hf_trainer.py")
    assert result.losses[:4] == pytest.approx(reference.losses, rel=2e-5), "the bound that both frameworks declare"
    assert len(result.losses) == 7, "one warm-up, three timed, and three profiled steps"
    assert result.num_params == reference.num_params
    assert (result.global_batch_size, result.seq_len, result.num_layers) == (8, 32, arch.num_layers)
    assert result.world_size == payload.num_ranks == len(result.peak_memory_bytes) == len(result.devices)
    assert result.timed_window_s == pytest.approx(sum(result.step_times_s), rel=0.05, abs=0.1)
    assert {"torch", "transformers", "accelerate"} <= set(result.versions)
    for rank in range(payload.num_ranks):
        with gzip.open(folder / "hf" / "trace" / f"rank{rank}.json.gz") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert names.count(f"{NONCE_MARK}a1b2") == 2, "every traced step says whose it is"
        assert ("gloo:all_reduce" in names) == (payload.num_ranks > 1)


def test_trains_the_same_model_on_the_same_data_as_cpu(tmp_path):
    """`make test-layouts` trains a mixture of experts too."""
    check_same_training(tmp_path, DENSE, {"dp": 2, "micro_batch_size": 2, "activation_checkpointing": "full"})


LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 24,
    "num_kv_heads": 4,
}
OF_FAMILIES = [
    ("mistral", DENSE, {"sliding_window": 8}),
    ("qwen2", DENSE, {"qkv_bias": True, "sliding_window": 8, "windowed_layers": 3}),
    ("qwen3", DENSE, {"qk_norm": True, "qkv_bias": True, "sliding_window": 8, "windowed_layers": 2}),
    ("qwen3_moe", MIXTRAL, {"qk_norm": True, "router_balance": "aux_loss"}),
    ("glm4_moe", MOE, {"qk_norm": True}),
    ("deepseek_v3", MOE, LATENT),
    ("deepseek_v3", DENSE, LATENT),
]


@pytest.mark.parametrize(("family", "arch", "features"), OF_FAMILIES)
def test_the_model_is_of_the_family_that_has_the_cards_features(script, family, arch, features):
    transformers = pytest.importorskip("transformers")
    arch = arch.model_copy(update=features)
    fields = script.describe_model(make_input({"micro_batch_size": 8}, arch=arch).model_dump(mode="json"))
    assert fields.pop("model_type") == family
    config = transformers.AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(count_parameters(arch), rel=0.01)
    assert arch.windowed_layers in (None, list(getattr(config, "layer_types", ())).count("sliding_attention"))


def test_a_model_with_latent_attention_and_shared_experts_trains_alike_on_every_layout(tmp_path):
    pytest.importorskip("accelerate")
    arch = MOE.model_copy(update=LATENT)

    def run(dp):
        payload = make_input({"dp": dp, "micro_batch_size": 4}, arch=arch).model_copy(update={"accelerator": "cpu"})
        return run_script(tmp_path / str(dp), payload, script="hf_trainer.py")

    one, two = run(1), run(2)
    assert one.losses == pytest.approx(two.losses, rel=2e-5)
    assert one.losses[-1] < one.losses[0]
    assert two.num_params == pytest.approx(count_parameters(arch), rel=0.01)


def test_the_global_batch_is_split_into_micro_batches_and_accumulation(script):
    data = make_input({"dp": 2, "micro_batch_size": 2}, global_batch=16).model_dump(mode="json")
    fields = script.render_arguments(data)
    assert fields["per_device_train_batch_size"] * fields["gradient_accumulation_steps"] * 2 == 16
    assert fields["max_steps"] == 4
    assert "fsdp" not in fields
    assert not fields["activation_checkpointing"]


@pytest.mark.parametrize(("stage", "reshard"), [(2, False), (3, True)])
def test_fsdp_shards_each_layer_and_checkpoints_activations_itself(script, stage, reshard):
    config = {"dp": 2, "micro_batch_size": 4, "zero_stage": stage, "activation_checkpointing": "full"}
    fields = script.render_arguments(make_input(config, arch=MIXTRAL).model_dump(mode="json"))
    assert fields["fsdp"] is True
    assert fields["fsdp_config"]["reshard_after_forward"] is reshard
    assert fields["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["MixtralDecoderLayer"]
    assert fields["fsdp_config"]["activation_checkpointing"]
    assert not fields["activation_checkpointing"], "Trainer refuses both"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 12}, "dp 2 x micro-batch 2 x accumulation 2 must be the global batch of 12, but is 8"),
        ({"num_ranks": 4}, "dp must be the number of ranks, 4, but it is 2"),
        ({"precision": "fp16"}, "precision must be one of fp32, bf16, not 'fp16'"),
        (
            {"config": {"dp": 2, "micro_batch_size": 2, "zero_stage": 1}},
            "zero_stage must be one of 0, 2, 3, but it is 1",
        ),
        (
            {"config": {"dp": 2, "micro_batch_size": 2, "activation_checkpointing": "selective"}},
            "activation_checkpointing must be none or full, but it is 'selective'",
        ),
    ],
)
def test_what_the_script_cannot_do_is_refused(script, changes, message):
    data = make_input({"dp": 2, "micro_batch_size": 2}).model_dump(mode="json") | changes
    with pytest.raises(script.IllegalConfig, match=message):
        script.render_arguments(data)


def test_cpus_have_no_fsdp_and_fewer_ranks_and_gpus_the_other_way_round():
    framework = load_framework("accelerate")
    on_cpus = build_space(load_card("tiny"), framework)
    assert set(on_cpus.column("zero_stage")) == {0}
    assert set(on_cpus.column("dp")) == {1, 2, 4}
    on_gpus = build_space(load_card("wl2"), framework)
    assert set(on_gpus.column("zero_stage")) == {0, 2, 3}
    assert set(on_gpus.column("dp")) == {load_card("wl2").hardware.num_accelerators}


def test_the_environment_cannot_change_what_accelerate_does(script, monkeypatch):
    import os

    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "FSDP_OFFLOAD_PARAMS", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "TRANSFORMERS_VERBOSITY", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    script._prepare_environment(1, True)
    assert not [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]
    assert "LOCAL_RANK" not in os.environ


CONFIG: dict[str, Value] = {"dp": 1, "micro_batch_size": 4, "activation_checkpointing": "full", "compile": False}
DDP = CONFIG | {"dp": 16, "micro_batch_size": 1, "zero_stage": 0, "optimizer": "adamw_torch_fused"}


@pytest.mark.parametrize(
    ("workload", "config", "kind"),
    [("tiny", CONFIG, "NO"), ("wl2", DDP, "MULTI_GPU"), ("wl2", DDP | {"zero_stage": 3}, "FSDP")],
)
def test_the_parsers_of_accelerate_and_transformers_read_the_launch(tmp_path, workload, config, kind):
    pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate.commands.config.config_args")
    from transformers import AutoConfig, HfArgumentParser, TrainingArguments

    card = load_card(workload)
    form = make_launch(card, "hf-trainer", config)
    for name, text in form.files.items():
        (tmp_path / name).write_text(text)
    read = accelerate.load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (read.distributed_type.value, read.num_processes) == (kind, config["dp"])
    assert read.use_cpu == (workload == "tiny")
    assert bool(read.fsdp_config) == (kind == "FSDP")
    fields = json.loads(form.files["training.json"]) | {"use_cpu": True}
    (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(fields)
    trained = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * read.num_processes
    assert trained == card.number("global_batch_size")
    model = AutoConfig.from_pretrained(tmp_path)
    assert (model.hidden_size, model.num_hidden_layers) == (card.arch.hidden_size, card.arch.num_layers)
    compile(form.files["train.py"], "train.py", "exec")
    assert form.command[:4] == ("accelerate", "launch", "--config_file", "accelerate.yaml")
    assert ("--machine_rank=NODE_RANK" in form.command) == (workload == "wl2"), "16 ranks on nodes of 4"


def test_several_ranks_on_cpus_are_started_by_torchrun_since_accelerate_starts_one():
    form = make_launch(load_card("tiny"), "hf-trainer", CONFIG | {"dp": 4})
    assert form.command == ("torchrun", "--standalone", "--nproc-per-node=4", "train.py", "training.json")
    assert "accelerate.yaml" not in form.files


def test_adapters_train_alike_on_every_layout_from_a_checkpoint(tmp_path):
    pytest.importorskip("peft")
    base, arch = tmp_path / "base", DENSE.model_copy(update={"lora_rank": 4})

    def run(name, arch=arch, **environment):
        dp = 2 if name == "two" else 1
        config = {"dp": dp, "micro_batch_size": 4, "activation_checkpointing": "full"}
        payload = make_input(config, arch=arch).model_copy(update={"accelerator": "cpu"})
        return run_script(tmp_path / name, payload, script="hf_trainer.py", environment=environment)

    one, two, whole = run("one"), run("two"), run("whole", DENSE)
    assert one.losses == pytest.approx(two.losses, rel=2e-5)
    assert one.losses[0] == pytest.approx(whole.losses[0], rel=1e-6), "adapters begin as zero"
    assert one.losses[1:] != whole.losses[1:]
    assert (
        one.num_params == count_parameters(arch) == count_parameters(DENSE) + 4 * 4 * (3 * (64 + 96) + 2 * 128 + 2 * 96)
    )
    fewer = arch.model_copy(update={"lora_targets": "attention"})
    program = "from transformers import LlamaConfig, LlamaForCausalLM as M; import sys, torch; torch.manual_seed(1);"
    shape = "num_hidden_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96"
    program += f"M(LlamaConfig(vocab_size=131, {shape})).save_pretrained(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(base)], check=True, capture_output=True)
    loaded = run("loaded", fewer, CCL_MODEL_PATH=str(base))
    assert loaded.num_params == count_parameters(fewer) < one.num_params
    assert loaded.losses != one.losses
