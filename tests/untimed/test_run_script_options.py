"""The options that run scripts render for frameworks, checked by golden files and lists of documented options."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
from paths import TESTS
from trials import DENSE, LAUNCHERS, MOE, make_input

from cclsearch.card.load import load_card
from cclsearch.core.content import list_frameworks
from cclsearch.core.values import Config, Failure, FailureKind, Value
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import trial_environment
from cclsearch.space.framework import load_framework
from cclsearch.tasks.training.contract import TrainingInput, TrainingResult

GOLDEN = TESTS / "golden" / "options"


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a run script as if it had been started from its folder."""
    monkeypatch.syspath_prepend(str(LAUNCHERS))
    spec = importlib.util.spec_from_file_location(f"run_script_{name}", LAUNCHERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def add_options(name: str, payload: TrainingInput) -> TrainingInput:
    """Return the input with the words that the framework file adds, as a search makes it."""
    card = load_card("wl5" if payload.arch.moe else "wl1").model_copy(update={"precision": payload.precision})
    return payload.model_copy(update={"options": load_framework(name).list_options(card, payload.config)})


def render(name: str, payload: TrainingInput, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    module = load_script(name, monkeypatch)
    data = add_options(name, payload).model_dump(mode="json")
    rendered = module.render_options(data) if name != "maxtext" else module.render_options(data, Path("/run/0001"))
    return list(rendered)


def check_golden(name: str, words: list[str]) -> None:
    path = GOLDEN / f"{name}.txt"
    text = "\n".join(words) + "\n"
    if os.environ.get("CCL_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


DENSE_CONFIG: dict[str, Value] = {
    "tp": 2,
    "dp": 2,
    "pp": 2,
    "micro_batch_size": 1,
    "activation_checkpointing": "full",
    "sequence_parallel": True,
    "zero_stage": 1,
    "virtual_pipeline": 2,
    "overlap_grad_reduce": True,
}


def test_megatron_dense(monkeypatch):
    payload = make_input(DENSE_CONFIG, global_batch=16, precision="bf16", profiled_steps=2)
    words = render("megatron", payload, monkeypatch)
    check_golden("megatron-dense", words)
    assert words[words.index("--global-batch-size") + 1] == "16", "the global batch is the card's for any degrees"


def test_megatron_experts(monkeypatch):
    config: dict[str, Value] = {
        "tp": 1,
        "dp": 4,
        "pp": 1,
        "ep": 4,
        "micro_batch_size": 2,
        "activation_checkpointing": "selective",
        "sequence_parallel": False,
        "zero_stage": 0,
    }
    words = render("megatron", make_input(config, arch=MOE, precision="bf16"), monkeypatch)
    check_golden("megatron-moe", words)
    for absent in ("--use-distributed-optimizer", "--sequence-parallel", "--untie-embeddings-and-output-weights"):
        assert absent not in words


FEATURES = [
    ({"qk_norm": True, "qkv_bias": True}, "--disable-bias-linear --add-qkv-bias --qk-layernorm", "use_qk_norm=True"),
    ({"sliding_window": 128}, "--window-size 127,0", ""),
    ({"sliding_window": 128, "windowed_layers": 1}, "--window-size 127,0 --window-attn-skip-freq [1,0]", ""),
    ({"mtp_layers": 1}, "--mtp-num-layers 1", ""),
    ({"router_balance": "aux_loss"}, "--moe-router-load-balancing-type aux_loss", "load_balance_loss_weight=0.001"),
    ({"router_balance": "bias"}, "--moe-router-enable-expert-bias", "routed_bias=true"),
    (
        {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 24},
        "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16",
        "attention_type=mla q_lora_rank=0 qk_nope_head_dim=16 kv_lora_rank=8",
    ),
]


@pytest.mark.parametrize(("features", "megatron", "maxtext"), FEATURES)
def test_the_models_features_are_options(features, megatron, maxtext, monkeypatch):
    payload = make_input({"micro_batch_size": 8}, arch=MOE.model_copy(update=features), precision="bf16")
    assert megatron in " ".join(render("megatron", payload, monkeypatch))
    assert maxtext.replace("=True", "=true") in " ".join(render("maxtext", payload, monkeypatch))


def test_maxtext_dense(monkeypatch):
    config: dict[str, Value] = {
        "tp": 2,
        "dp": 4,
        "micro_batch_size": 2,
        "activation_checkpointing": "minimal",
        "zero_stage": 3,
    }
    words = render("maxtext", make_input(config, global_batch=16, precision="bf16", profiled_steps=3), monkeypatch)
    check_golden("maxtext-dense", words)
    settings = dict(word.split("=", 1) for word in words)
    trained = float(settings["per_device_batch_size"]) * 8 * int(settings["gradient_accumulation_steps"])
    assert trained == 16, "devices x per-device batch x accumulation is the card's global batch"


def test_maxtext_experts(monkeypatch):
    config: dict[str, Value] = {"tp": 1, "dp": 4, "ep": 2, "micro_batch_size": 2, "activation_checkpointing": "none"}
    words = render("maxtext", make_input({**config, "zero_stage": 0}, arch=MOE), monkeypatch)
    check_golden("maxtext-moe", words)
    settings = dict(word.split("=", 1) for word in words)
    degrees = [int(value) for name, value in settings.items() if re.fullmatch(r"(ici|dcn)_\w+_parallelism", name)]
    assert settings["ici_expert_parallelism"] == "2"
    assert math.prod(degrees) == 4, (
        "the product of the axes is the number of devices: experts use a part of the data axis"
    )


@pytest.mark.parametrize(("dense", "width"), [(0, "32"), (1, "96")])
def test_maxtext_has_one_width_in_models_of_experts_only(dense, width, monkeypatch):
    """MaxText 0.2.5, configs/types.py: such a model's base_mlp_dim must equal base_moe_mlp_dim."""
    arch = MOE.model_copy(update={"moe": MOE.moe.model_copy(update={"num_dense_layers": dense})})
    words = render("maxtext", make_input({"tp": 1, "dp": 4, "ep": 2, "micro_batch_size": 2}, arch=arch), monkeypatch)
    assert {f"base_mlp_dim={width}", "base_moe_mlp_dim=32"} <= set(words)


@pytest.mark.parametrize(
    ("name", "option"),
    [("megatron", "--context-parallel-size"), ("torchtitan", "--parallelism.context_parallel_degree")],
)
def test_context_parallelism_is_an_option_only_if_the_space_has_it(name, option, monkeypatch):
    config: dict[str, Value] = {"tp": 1, "dp": 2, "pp": 1, "micro_batch_size": 1, "zero_stage": 0}
    assert option not in render(name, make_input(config), monkeypatch)
    words = render(name, make_input({**config, "cp": 4}), monkeypatch)
    assert words[words.index(option) + 1] == "4"
    balancer = "--parallelism.context_parallel_load_balancer"
    assert (balancer in words) == (name == "torchtitan"), "FlexAttention's block mask needs its own balancer"
    assert balancer not in render(name, make_input({**config, "cp": 1}), monkeypatch)


@pytest.mark.parametrize(
    ("layers", "pp", "chunks", "option"),
    [
        (8, 4, 1, None),
        (8, 2, 2, "--num-virtual-stages-per-pipeline-rank 2"),
        (27, 4, 1, "--pipeline-model-parallel-layout Et*7|t*7|t*7|t*6L"),
        (26, 4, 1, "--pipeline-model-parallel-layout Et*6|t*7|t*7|t*6L"),
        (7, 2, 2, "--pipeline-model-parallel-layout Et*2|t*2|t*2|t*1L"),
        (3, 2, 2, "--pipeline-model-parallel-layout E|t|t|tL"),
        (2, 2, 2, "--pipeline-model-parallel-layout E|t|t|L"),
    ],
)
def test_megatron_gets_a_layout_if_layers_do_not_divide_into_chunks(layers, pp, chunks, option, monkeypatch):
    words = load_script("megatron", monkeypatch)._pipeline({"pp": pp, "virtual_pipeline": chunks}, layers)
    assert " ".join(words) == (option or "")
    if words and "layout" in words[0]:
        stages = [re.sub(r"t\*(\d+)", lambda m: "t" * int(m[1]), stage) for stage in words[1].split("|")]
        assert (len(stages), "".join(stages)) == (pp * chunks, f"E{'t' * layers}L"), "as Megatron-LM reads it"


def test_megatron_refuses_more_chunks_than_layers_embedding_and_loss(monkeypatch):
    script = load_script("megatron", monkeypatch)
    with pytest.raises(sys.modules["common"].IllegalConfig, match="1 layers, embedding and loss are fewer than"):
        script.render_layout(1, 4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pp": 4, "micro_batch_size": 1}, "1F1B"),
        ({"pp": 4, "micro_batch_size": 4}, "GPipe"),
        ({"pp": 4, "micro_batch_size": 1, "virtual_pipeline": 2}, "Interleaved1F1B"),
        ({"pp": 1, "micro_batch_size": 4}, "1F1B"),
    ],
)
def test_torchtitan_gets_a_schedule_that_torch_accepts(config, expected, monkeypatch):
    """torch refuses 1F1B with fewer micro-batches than stages."""
    words = render("torchtitan", make_input({"tp": 1, "dp": 1, "zero_stage": 0, **config}), monkeypatch)
    assert words[words.index("--parallelism.pipeline_parallel_schedule") + 1] == expected


def test_torchtitan_replicates_shards(monkeypatch):
    config: dict[str, Value] = {"tp": 1, "dp": 8, "pp": 1, "micro_batch_size": 1, "zero_stage": 3, "dp_replicate": 2}
    words = render("torchtitan", make_input(config), monkeypatch)
    degrees = [words[words.index(f"--parallelism.data_parallel_{kind}_degree") + 1] for kind in ("replicate", "shard")]
    assert degrees == ["2", "4"]


def test_knobs_of_xla_flags_are_joined():
    maxtext = load_framework("maxtext")
    config: dict[str, Value] = {"xla_vmem_limit": "moe", "xla_data_parallel_overlap": "on", "tp": 2}
    assert maxtext.knob_environment(config) == {
        "LIBTPU_INIT_ARGS": "--xla_tpu_enable_data_parallel_all_reduce_opt=true"
        " --xla_tpu_data_parallel_opt_different_sized_ops=true --xla_tpu_scoped_vmem_limit_kib=81920"
    }
    assert maxtext.knob_environment({"xla_vmem_limit": "default"}) == {}
    for knob in (knob for knob in maxtext.optional_knobs if knob.env):
        assert set(knob.writes) == set(knob.choices) - {"default"}


def test_an_undocumented_option_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(LAUNCHERS))
    import options

    with pytest.raises(ValueError, match=r"megatron does not document .*: --make-it-fast"):
        options.check_options(["--lr", "--make-it-fast"], "megatron")


@pytest.mark.parametrize("name", ["megatron", "maxtext", "torchtitan"])
def test_option_lists_name_source_and_version(name):
    head = (LAUNCHERS / f"{name}.options.txt").read_text().splitlines()[:4]
    assert any(line.startswith("# Source: ") for line in head)


KNOBS: list[dict[str, Value]] = [
    {"tp": 1, "dp": 2, "pp": 1, "micro_batch_size": 1, "zero_stage": 0, "activation_checkpointing": "none"},
    {"tp": 2, "dp": 4, "pp": 2, "micro_batch_size": 1, "zero_stage": 1, "activation_checkpointing": "none"},
    {"tp": 2, "dp": 4, "micro_batch_size": 1, "zero_stage": 3, "activation_checkpointing": "full", "compile": True},
]
"""Configurations in which knobs have an effect: some need another knob."""


TRAINING = [
    name
    for name in list_frameworks()
    if load_framework(name).shows_launch and "training" in (load_framework(name).tasks or ("training",))
]
"""Frameworks that train and show what they launch; tests/light/test_engines.py covers those that serve."""


@pytest.mark.parametrize("name", TRAINING)
def test_every_choice_of_every_knob_is_part_of_the_launch_or_refused(name, monkeypatch):
    """A run script supports every knob that its framework declares: none is silently ignored."""
    framework = load_framework(name)
    script = load_script(framework.script_path.stem, monkeypatch)
    card = load_card("wl5")
    precision = "bf16" if "fp32" not in (framework.precisions or ("fp32",)) else "fp32"

    def launch(config: dict[str, Value]) -> str:
        arch = DENSE if {"experts", "shared_experts"} & set(framework.cannot) else MOE
        payload = add_options(name, make_input(config, arch=arch, global_batch=64, precision=precision))
        try:
            form = script.show_launch(payload.model_dump(mode="json"))
        except Exception as error:  # a configuration that the script refuses
            return f"{type(error).__name__}: {error}"
        files = {file: text for file, text in form.files.items() if file != "config.json"}
        return str((form.command, files, form.environment, framework.knob_environment(Config(config))))

    assert not launch({knob.name: knob.resolve(card).choices[0] for knob in framework.knobs}).startswith("Value")
    ignored = {}
    for knob in (*framework.knobs, *framework.optional_knobs):
        choices = [choice for choice in knob.resolve(card).choices if choice not in (16, 32, 64)]
        where = {other: values[0] for other, values in knob.where.items()}
        seen = [len({launch({**base, **where, knob.name: choice}) for choice in choices}) for base in KNOBS]
        if knob.name in ("stage_layers", "device_order"):  # from the trial's input: test_unlike.py, test_placement.py
            continue
        if max(seen) < len(choices):
            ignored[knob.name] = choices
    assert ignored == {}


def list_texts(script: Path) -> set[object]:
    """Return every constant of a run script and of the modules of its folder that it imports."""
    nodes = list(ast.walk(ast.parse(script.read_text())))
    found: set[object] = {node.value for node in nodes if isinstance(node, ast.Constant)}
    for node in nodes:
        module = LAUNCHERS / f"{node.module}.py" if isinstance(node, ast.ImportFrom) else script
        if module != script and module.is_file() and module.name != "common.py":
            found |= list_texts(module)
    return found


@pytest.mark.parametrize(
    "name", [n for n in list_frameworks() if load_framework(n).script and not load_framework(n).shows_launch]
)
def test_a_script_that_trains_itself_reads_every_knob_of_its_framework(name):
    """Its launch is `config.json`, which has every knob: what matters is that the script reads it."""
    framework = load_framework(name)
    read = list_texts(framework.script_path)
    knobs = {knob.name for knob in (*framework.knobs, *framework.optional_knobs) if not (knob.env or knob.adds)}
    assert "options" in read or not any(knob.adds for knob in framework.all_knobs)
    # `Trial.micro_batch_size` of common.py reads this one
    assert knobs - read - {"micro_batch_size"} == set()


@pytest.mark.parametrize("checkout", [None, "empty"])
def test_missing_megatron_is_not_an_illegal_configuration(tmp_path, checkout):
    """An infrastructure failure: costs no budget, and the search stops after a few such trials."""
    from trials import make_job

    payload = make_input({"tp": 1, "dp": 1, "micro_batch_size": 2})
    job = make_job(tmp_path / "trial", payload)
    environment = {**os.environ, **trial_environment(job.trial_dir, payload)}
    environment.pop("MEGATRON_PATH", None)
    if checkout is not None:
        (tmp_path / checkout).mkdir()
        environment["MEGATRON_PATH"] = str(tmp_path / checkout)
    command = [sys.executable, str(LAUNCHERS / "megatron.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    failure = collect_result(job.trial_dir, TrainingResult, exit_code=done.returncode)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.LAUNCHER
    assert failure.kind.is_infrastructure
    assert "MEGATRON_PATH must name a checkout of Megatron-LM" in failure.message
    assert "set it in the profile's `environment`" in failure.message


MAXTEXT_LOG = """\
number parameters: 8.030 billion
Memstats: After params initialized: Using (GB) 5.1 / 15.75 (32.4%) on TPU_0(process=0,(0,0,0,0))
completed step: 0, seconds: 45.235, TFLOP/s/device: 1.2, Tokens/s/device: 90.5, total_weights: 256, loss: 11.764
completed step: 1, seconds: 0.410, TFLOP/s/device: 90.2, Tokens/s/device: 9900.1, total_weights: 256, loss: 11.701
completed step: 2, seconds: 0.402, TFLOP/s/device: 92.0, Tokens/s/device: 9990.0, total_weights: 256, loss: 11.622
completed step: 3, seconds: 0.405, TFLOP/s/device: 91.3, Tokens/s/device: 9950.2, total_weights: 256, loss: 11.540
completed step: 4, seconds: 1.905, TFLOP/s/device: 19.3, Tokens/s/device: 2110.8, total_weights: 256, loss: 11.470
"""


def test_maxtext_log_is_parsed_and_traces_are_collected(tmp_path):
    """A fake trainer prints MaxText's log; compilation and profiled steps are left out."""
    from trials import run_script

    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        "import pathlib, sys\n"
        "settings = dict(word.split('=', 1) for word in sys.argv[1:])\n"
        "folder = pathlib.Path(settings['base_output_directory'], settings['run_name'])\n"
        "folder = folder / 'tensorboard/plugins/profile/1'\n"
        "folder.mkdir(parents=True); (folder / 'host.xplane.pb').write_bytes(b'x')\n"
        "losses = {0: 11.9001, 1: 11.8002, 2: 11.7003, 3: 11.6004, 4: 11.5005}\n"
        'lines = [\'{"step": %d.0, "learning/loss": %s}\' % item for item in losses.items()]\n'
        "pathlib.Path(settings['metrics_file']).write_text('\\n'.join(lines))\n"
        f"print({MAXTEXT_LOG!r})\n"
    )
    payload = make_input({"tp": 2, "dp": 2, "micro_batch_size": 4, "zero_stage": 3}, profiled_steps=1)
    environment = {"MAXTEXT_COMMAND": f"{sys.executable} {trainer}"}
    result = run_script(tmp_path / "trial", payload, script="maxtext.py", environment=environment)
    assert result.step_times_s == (0.410, 0.402, 0.405)
    assert result.global_batch_size == 8, "256 tokens in sequences of 32, by the log"
    assert result.peak_memory_bytes == (5_100_000_000,) * 4
    assert result.losses == (11.9001, 11.8002, 11.7003, 11.6004, 11.5005), "not the rounded ones of the log"
    assert result.precision == "fp32"
    assert (tmp_path / "trial/trace/plugins/profile/1/host.xplane.pb").is_file()


def test_maxtext_marks_its_traces_with_the_nonce_of_the_attempt(monkeypatch):
    """The trainer runs under a program that adds an annotation to every trace; other commands are unchanged."""
    script, trainer = load_script("maxtext", monkeypatch), load_script("maxtext_trainer", monkeypatch)
    program = str(LAUNCHERS / "maxtext_trainer.py")
    assert script.mark_command(["python", "-m", "maxtext.train", "a.yml"]) == [
        "python",
        program,
        "maxtext.train",
        "a.yml",
    ]
    assert script.mark_command(["./start", "-m"]) == ["./start", "-m"]
    calls: list[str] = []

    class Profiler:
        @staticmethod
        def start_trace(folder: str, **options: int) -> None:
            calls.append(f"trace to {folder} with {options}")

        @staticmethod
        @contextlib.contextmanager
        def TraceAnnotation(name: str) -> Iterator[None]:
            calls.append(name)
            yield

    trainer.mark_traces(Profiler, "ccl-search::a1b2")
    Profiler.start_trace("/run", level=2)
    assert calls == ["trace to /run with {'level': 2}", "ccl-search::a1b2"]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_global_batch_has_the_same_sequences_for_any_number_of_ranks(ranks, monkeypatch):
    """torchtitan's data: each rank draws its sequences by their numbers in the whole data."""
    number_sequences = load_script("common", monkeypatch).number_sequences
    streams = [number_sequences(8, rank=rank, ranks=ranks) for rank in range(ranks)]
    for step in range(3):
        taken = [number for stream in streams for number in itertools.islice(stream, 8 // ranks)]
        assert taken == list(range(8 * step, 8 * step + 8))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
def test_torchtitans_micro_batches_work_with_a_released_torch(schedule, monkeypatch):
    """torchtitan passes lists of micro-batches and sets timeouts in calls that torch 2.13 has by other names."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    script = load_script("torchtitan", monkeypatch)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        script.alias_set_timeout()
        dist.set_timeout(timedelta(seconds=60), None)
        layers = [torch.nn.Linear(3, 3, bias=False) for _ in range(2)]
        chunks = layers if schedule == "Interleaved1F1B" else [torch.nn.Sequential(*layers)]
        stages = [PipelineStage(chunk, n, len(chunks), torch.device("cpu")) for n, chunk in enumerate(chunks)]
        made = get_schedule_class(schedule)(
            stages if len(stages) > 1 else stages[0],
            n_microbatches=2,
            loss_fn=lambda out, target: ((out - target) ** 2).sum(),
        )
        script.accept_micro_batches(made)
        inputs, losses = [torch.ones(2, 3), 2 * torch.ones(2, 3)], []
        targets = [torch.zeros(2, 3) for _ in inputs]
        made.step(arg_mbs=[(x,) for x in inputs], target_mbs=targets, losses=losses, return_outputs=False)
    finally:
        dist.destroy_process_group()
    assert [loss.item() for loss in losses] == pytest.approx(
        [(layers[1](layers[0](x)) ** 2).sum().item() for x in inputs]
    )
    assert all(layer.weight.grad is not None for layer in layers)
