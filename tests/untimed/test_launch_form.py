"""How to run a configuration by hand: what run scripts state, and what is printed of it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cclsearch.card.load import load_card
from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.trust import trust_project
from cclsearch.core.values import Value
from cclsearch.report import launch_form
from cclsearch.report.launch_form import LaunchForm, make_launch

FRAMEWORK = """\
script: mine.py
runner: process
shows_launch: true
knobs:
  - {name: tp, choices: [1, 2]}
"""
CONFIG: dict[str, Value] = {"tp": 2, "dp": 2, "pp": 1, "micro_batch_size": 2, "zero_stage": 1}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose framework `mine` has a run script that a test writes."""
    (tmp_path / "launchers").mkdir()
    (tmp_path / "launchers" / "mine.framework.yaml").write_text(FRAMEWORK)
    trust_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(project: Path, script: str) -> LaunchForm:
    (project / "launchers" / "mine.py").write_text(script)
    return make_launch(load_card("tiny"), "mine", {"tp": 2})


def place(card: Card, *, ranks_per_node: int) -> Card:
    return card.model_copy(
        update={"hardware": card.hardware.model_copy(update={"accelerators_per_node": ranks_per_node})}
    )


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("megatron", "--tensor-model-parallel-size"),
        ("maxtext", "ici_tensor_parallelism=2"),
        ("torchtitan", "--parallelism.tensor_parallel_degree"),
        ("nanotron", "nanotron.yaml"),
    ],
)
def test_a_run_script_states_its_launch_without_its_framework(name, sign):
    form = make_launch(load_card("wl2"), name, {**CONFIG, "zero_stage": 0})
    assert sign in form.command
    assert form.checked
    assert any("A trial " in note for note in form.notes), "it says how a trial differs"


def test_the_variables_of_knobs_are_part_of_the_launch():
    form = make_launch(load_card("wl2"), "megatron", {**CONFIG, "nccl_algo": "Ring", "nccl_proto": "default"})
    assert form.environment.items() >= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring"}.items()


@pytest.mark.parametrize("framework", ["megatron", "gpu"])
def test_ranks_are_placed_on_nodes_as_launchers_place_them(framework):
    config: dict[str, Value] = {"tp": 1, "dp": 12, "micro_batch_size": 1}
    form = make_launch(place(load_card("wl2"), ranks_per_node=8), framework, config)
    assert form.command[:4] == ("torchrun", "--nnodes=2", "--node-rank=NODE_RANK", "--nproc-per-node=8")
    assert any("last node has --nproc-per-node=4" in note for note in form.notes)
    alone = make_launch(place(load_card("wl2"), ranks_per_node=16), framework, config)
    assert alone.command[:3] == ("torchrun", "--standalone", "--nproc-per-node=12")
    assert not any("NODE_RANK" in note for note in alone.notes)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("print('--lr 1')", "printed no JSON object"),
        ("print('[1]')", "valid dictionary"),
        ("print('{}')", "title: Field required"),
        ("raise SystemExit('no such model')", "no such model"),
        ("raise SystemExit(3)", "it exited with 3"),
        ("print('x' * 2**21)", "bytes, more than"),
        ("import time; time.sleep(60)", "timed out"),
        (
            "import json; print(json.dumps(dict(title='a', command=['b'], checked='', files={'../x': ''})))",
            "should match",
        ),
        (
            "import json; print(json.dumps(dict(title='a', command=['b'], checked='', environment={'A B': ''})))",
            "should match",
        ),
        ("import json; print(json.dumps(dict(title='a', command=[], checked='')))", "command"),
    ],
)
def test_what_a_script_prints_instead_of_a_form_is_an_error_of_one_line(script, why, project, monkeypatch):
    monkeypatch.setattr(launch_form, "_TIMEOUT_S", 5)
    with pytest.raises(UserError, match=rf"mine: mine.py --show-launch failed: .*{why}") as caught:
        ask(project, script)
    assert "\n" not in str(caught.value)


def test_a_script_that_does_not_declare_it_is_never_started(project):
    """It would train: the launch is its own command instead."""
    path = project / "launchers" / "mine.framework.yaml"
    path.write_text(FRAMEWORK.replace("shows_launch: true\n", ""))
    form = ask(project, "open('started', 'w')")
    assert not (project / "started").exists()
    assert form.command == ("python", str(project / "launchers" / "mine.py"))
    assert json.loads(form.files["config.json"])["config"] == {"tp": 2}
    assert form.environment == {"CCL_TRIAL_DIR": ".", "CCL_CONFIG": "config.json", "CCL_TP": "2"}


def test_the_shell_script_writes_the_files_and_passes_each_word_as_it_is(tmp_path):
    words = ["a b", "$(touch hacked)", "'; touch hacked; '", "`touch hacked`", "*", "x" * 150, ""]
    text = "one\nEOF\n$HOME `touch hacked`\\\nEOF_\n"
    form = LaunchForm(
        title="t",
        command=("python3", "-c", "import os, sys; print(ascii([os.environ['MINE'], *sys.argv[1:]]))", *words),
        files={"mine.yaml": text},
        environment={"MINE": "$(touch hacked) 'x'"},
        checked="nothing\ntouch hacked",
        notes=("a\ntouch hacked",),
    )
    done = subprocess.run(["sh", "-e"], input=form.as_shell(), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ascii(["$(touch hacked) 'x'", *words])
    assert (tmp_path / "mine.yaml").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]


@pytest.mark.parametrize("framework", ["cpu", "jax-cpu"])
def test_the_printed_launch_of_a_shipped_script_runs(framework, tmp_path):
    config = {"tp": 1, "dp": 2, "micro_batch_size": 8, "activation_checkpointing": "none", "zero_stage": 0}
    script = make_launch(load_card("tiny"), framework, config).as_shell()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-e"], input=script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "ok"
    assert result["world_size"] == 2
    assert shlex.split(script.splitlines()[-1])[-1].endswith(".py")


def test_space_explain_prints_the_launch_of_one_configuration(cli):
    words = ["space", "explain", "--workload", "tiny", "--launch", "--config"]
    knobs = "tp=1,dp=2,pp=1,micro_batch_size=8,activation_checkpointing=none,zero_stage=0"
    assert "torchrun --standalone --nproc-per-node=2 " in cli.out([*words, knobs])
    assert cli.json([*words, knobs, "--json"])["launch"]["environment"]["CCL_DP"] == "2"
    assert "--config lacks pp, micro_batch_size, activation_checkpointing, zero_stage" in cli.err([*words, "tp=1,dp=2"])
    assert "torchrun" not in cli.out([*words, knobs.replace("tp=1", "tp=3")], 1), "it is not in the search space"
    assert "--launch needs one configuration" in cli.err(["space", "--workload", "tiny", "--launch"])


@pytest.mark.parametrize(
    ("framework", "tuned", "fixed"),
    [
        ("megatron", "--tensor-model-parallel-size", "--hidden-size"),
        ("torchtitan", "    config.parallelism.tensor_parallel_degree = ", "config.training.seq_len"),
        ("nanotron", "parallelism:\n  dp: ", "hidden_size"),
        ("hf-trainer", '"per_device_train_batch_size": ', "max_steps"),
        ("maxtext", "ici_fsdp_parallelism=", "base_emb_dim"),
    ],
)
def test_a_patch_has_only_what_knobs_decide(framework, tuned, fixed, project, cli):
    words = ["-w", "wl2", "--framework", framework, "-l", "simulate", "--budget", "1", "--name", "r", "--quiet"]
    cli.out(["run", *words])
    patch = cli.out(["best", "r", "--patch"])
    launch = json.loads(cli.out(["best", "r", "--json"]))["launch"]
    assert tuned in patch
    assert fixed not in patch
    assert fixed.removeprefix("config.") in " ".join([*launch["command"], *launch["files"].values()])
