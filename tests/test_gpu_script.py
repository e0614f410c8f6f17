"""The run script `gpu` without a GPU (over gloo): the same training as `cpu`, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from trials import DENSE, make_input, run_script

from cclsearch.core.values import Value

pytest.importorskip("torch")

pytestmark = pytest.mark.serial

ON_CPU = {"CCL_DEVICE": "cpu"}
ARCH = DENSE.model_copy(update={"num_kv_heads": 4})
LAYOUTS: list[dict[str, Value]] = [
    {"micro_batch_size": 8, "optimizer": "fused", "attention": "math"},
    {"micro_batch_size": 2, "dp": 2, "optimizer": "foreach", "attention": "flash", "activation_checkpointing": "full"},
]


def test_losses_agree_with_those_of_the_cpu_script(tmp_path: Path) -> None:
    alone = run_script(tmp_path / "cpu", make_input({"micro_batch_size": 8}, arch=ARCH))
    for index, layout in enumerate(LAYOUTS):
        payload = make_input(layout, arch=ARCH, profiled_steps=1)
        result = run_script(tmp_path / str(index), payload, script="gpu.py", environment=ON_CPU)
        assert result.losses[: len(alone.losses)] == pytest.approx(alone.losses, abs=2e-4), layout
        assert (result.global_batch_size, result.num_layers, result.world_size) == (8, 4, 1 + index)
        assert len(list((tmp_path / str(index) / "trace").iterdir())) == 1 + index
        assert result.energy_j is None, "a CPU has no counter"
