"""CCL-Bench's `tuning_config.yaml`: its dimensions become knobs; what has no counterpart is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.space.parse import read_tuning_config

FILE = """config_space:
  - {key: tp, type: int, description: Tensor parallelism degree, choices: [1, 2, 4]}
  - {key: pp, type: int, choices: [1, 3, 9]}
  - {key: micro_batch, type: int, choices: [1, 2, 4]}
  - {key: compile_mode, type: str, choices: [eager, inductor, max-autotune]}
  - {key: activation_checkpointing, type: bool, choices: [true, false]}
optimization_goal: {direction: minimize, metrics: [{name: avg_step_time, weight: 1.0}]}
publish_dir: ''
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "tuning_config.yaml"
    path.write_text(text)
    return path


def test_dimensions_become_knobs_by_our_names_and_values(tmp_path):
    knobs = {knob.name: knob for knob in read_tuning_config(write(tmp_path, FILE))}
    assert {name: knob.choices for name, knob in knobs.items()} == {
        "tp": (1, 2, 4),
        "pp": (1, 3, 9),
        "micro_batch_size": (1, 2, 4),
        "compile": (False, True),
        "inductor_autotune": ("default", "on"),
        "activation_checkpointing": ("full", "none"),
    }
    assert knobs["tp"].description == "Tensor parallelism degree"
    assert read_tuning_config(None) == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("config_space:", "space:", "needs `config_space`"),
        ("max-autotune", "turbo", r"dimension 'compile_mode': 'turbo' has no counterpart here; known: eager, inductor"),
        ("choices: [1, 2, 4]}", "choices: [1, two]}", r"'two' is not of type int"),
        ("choices: [1, 2, 4]}", "choices: [1, true]}", r"(?i)true is not of type int"),
        ("choices: [1, 2, 4]}", "choices: []}", r"choices"),
        ("key: pp", "key: tensor_parallel_size", r"two dimensions are the knob 'tp'"),
        ("key: pp", "key: 'P P'", r"key"),
        ("type: bool, ", "", r"type"),
        ("type: bool", "type: matrix", r"type"),
        ("choices: [true, false]", "choices: {a: 1}", r"choices"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, old, new, message):
    path = write(tmp_path, FILE.replace(old, new, 1))
    with pytest.raises(UserError, match=message) as caught:
        read_tuning_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_commands_search_its_dimensions(tmp_path, capsys, cli):
    path = write(tmp_path, FILE)
    words = ["--workload", "wl5", "--framework", "torchtitan", "--use-fewer", "--tuning-config", str(path)]
    assert "pp                        1, 3, 9 ranks" in cli.out(["space", *words])
    assert "tp=4" in cli.out(["predict", *words, "--config", "tp=4,pp=3", "--top", "1"])
    assert main(["space", *words, "--knob", "pp=1"]) == 0
    assert "pp                        1 ranks" in capsys.readouterr().out, "--knob comes after the file"
    assert main(["space", "--workload", "wl5", "--framework", "megatron", "--tuning-config", str(path)]) == 2
    assert "has no knob 'compile', 'inductor_autotune'" in capsys.readouterr().err
    assert main(["space", "--workload", "wl5", "--tuning-config", str(tmp_path / "missing.yaml")]) == 2
