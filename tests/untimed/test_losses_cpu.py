"""With one model, seed and global batch, every layout has the same losses: the parallel training is correct."""

from __future__ import annotations

from pathlib import Path

import pytest
from packages import needs
from trials import MOE, make_input, run_script

from cclsearch.card.model import ModelArch
from cclsearch.core.values import Value

pytestmark = needs("torch")


LAYOUT: dict[str, Value] = {"tp": 2, "pp": 2, "ep": 2, "micro_batch_size": 2, "rank_order": "pp-tp-dp"}


def check_same_losses(folder: Path, arch: ModelArch, layouts: list[dict[str, Value]]) -> None:
    """Assert that each layout has the losses of one rank; the tests of layouts assert through this."""
    alone = run_script(folder / "alone", make_input({"micro_batch_size": 8}, arch=arch))
    assert len(alone.losses) == 4, "one warm-up and three timed steps"
    assert alone.precision == "fp32"
    assert alone.losses[-1] < alone.losses[0] - 0.05, "the model must learn, or equal losses would prove little"
    for index, layout in enumerate(layouts):
        result = run_script(folder / str(index), make_input(layout, arch=arch))
        assert result.losses == pytest.approx(alone.losses, abs=2e-4), layout
        assert result.num_params == alone.num_params, layout
        assert (result.global_batch_size, result.seq_len) == (8, 32)


def test_losses_agree_between_one_rank_and_tensor_pipeline_and_expert_parallelism(tmp_path: Path) -> None:
    """`make test-layouts` trains the other layouts."""
    check_same_losses(tmp_path, MOE, [LAYOUT])
