"""JAX on CPU devices: the same losses on one device and on four, and an XLA trace."""

from __future__ import annotations

import pytest
from packages import needs
from trials import MOE, make_input, run_script

from cclsearch.core.values import Value
from cclsearch.launch.contract import NONCE_MARK
from cclsearch.trace.read import open_trace
from cclsearch.trace.score import score_view

pytestmark = needs("jax")


LAYOUT: dict[str, Value] = {
    "dp": 2,
    "ep": 2,
    "tp": 2,
    "micro_batch_size": 2,
    "activation_checkpointing": "full",
    "attention": "grouped",
}


def test_losses_agree_between_layouts(tmp_path):
    alone = run_script(tmp_path / "alone", make_input({"micro_batch_size": 8}, arch=MOE), script="jax_cpu.py")
    assert alone.losses[-1] < alone.losses[0] - 0.05, "the model must learn, or equal losses would prove little"
    payload = make_input(LAYOUT, arch=MOE, profiled_steps=1).model_copy(update={"nonce": "a1b2"})
    sharded = run_script(tmp_path / "sharded", payload, script="jax_cpu.py")
    assert sharded.losses[:4] == pytest.approx(alone.losses, rel=2e-5), "the bound that jax-cpu declares"
    assert sharded.num_params == alone.num_params
    assert sharded.world_size == len(sharded.peak_memory_bytes) == 4
    (trace,) = (tmp_path / "sharded" / "trace").rglob("*.xplane.pb")
    assert f"{NONCE_MARK}a1b2".encode() in trace.read_bytes()


def test_trains_in_bf16_and_its_trace_has_the_flops_of_the_shapes(tmp_path):
    payload = make_input({"micro_batch_size": 8}, precision="bf16", profiled_steps=2)
    result = run_script(tmp_path, payload, script="jax_cpu.py")
    assert result.precision == "bf16"
    assert result.losses[-1] < result.losses[0] - 0.05
    rate = score_view(open_trace(tmp_path / "trace"), ["gemm_tflops"]).metrics["gemm_tflops"]
    arch, tokens = payload.arch, payload.global_batch_size * payload.seq_len
    heads = arch.num_heads * arch.head_dim
    attention = arch.hidden_size * (2 * heads + 2 * arch.num_kv_heads * arch.head_dim)  # queries, output, keys, values
    layer = attention + 3 * arch.hidden_size * arch.intermediate_size + 2 * heads * payload.seq_len
    forward = 2 * tokens * (arch.num_layers * layer + arch.vocab_size * arch.hidden_size)
    assert rate.inputs["flops"] == rate.n_steps * 3 * forward
