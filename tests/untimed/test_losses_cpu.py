"""With one model, seed and global batch, every layout has the same losses: the parallel training is correct."""

from __future__ import annotations

from pathlib import Path

import pytest
from trials import DENSE, MOE, make_input, run_script

from cclsearch.card.model import ModelArch
from cclsearch.core.values import Value

pytest.importorskip("torch")


DENSE_LAYOUTS: list[dict[str, Value]] = [
    {"dp": 2, "micro_batch_size": 2, "zero_stage": 1, "activation_checkpointing": "full"},
    {"tp": 2, "micro_batch_size": 4, "activation_checkpointing": "selective"},
    {"tp": 2, "pp": 2, "micro_batch_size": 1, "rank_order": "pp-tp-dp"},
]
MOE_LAYOUTS: list[dict[str, Value]] = [
    {"pp": 2, "dp": 2, "ep": 2, "micro_batch_size": 1},
    {
        "tp": 2,
        "dp": 2,
        "rank_order": "dp-tp-pp",
        "ep": 4,
        "micro_batch_size": 2,
        "activation_checkpointing": "full",
        "zero_stage": 1,
    },
]


def check_same_losses(folder: Path, arch: ModelArch, layouts: list[dict[str, Value]]) -> None:
    """Assert that each layout has the losses of one rank; both tests below assert through this."""
    alone = run_script(folder / "alone", make_input({"micro_batch_size": 8}, arch=arch))
    assert len(alone.losses) == 4, "one warm-up and three timed steps"
    assert alone.precision == "fp32"
    assert alone.losses[-1] < alone.losses[0] - 0.05, "the model must learn, or equal losses would prove little"
    for index, layout in enumerate(layouts):
        result = run_script(folder / str(index), make_input(layout, arch=arch))
        assert result.losses == pytest.approx(alone.losses, abs=2e-4), layout
        assert result.num_params == alone.num_params, layout
        assert (result.global_batch_size, result.seq_len) == (8, 32)


def test_dense_losses_agree_between_layouts(tmp_path: Path) -> None:
    check_same_losses(tmp_path, DENSE, DENSE_LAYOUTS)


def test_mixture_of_experts_losses_agree_between_layouts(tmp_path: Path) -> None:
    check_same_losses(tmp_path, MOE, MOE_LAYOUTS)
