"""Figures of real traces: where HolisticTraceAnalysis 0.5 computes the same thing, and what the tables cover."""

from __future__ import annotations

import pytest
from real_traces import measure, needs_traces, view_of

from cclsearch.trace.answers.operators import build_operator_tree, list_unclassified

pytestmark = needs_traces


def test_launch_statistics_agree_with_holistic_trace_analysis():
    inputs = measure("resnet-ddp-a100", "launch_delay").inputs
    assert (inputs["num_launches"], inputs["num_delays_above_100_us"], inputs["num_calls_above_50_us"]) == (
        2516,
        180,
        0,
    )


def test_the_longest_queue_agrees_with_holistic_trace_analysis():
    assert measure("async-v100", "queue_length").inputs["max"] == 1022


@pytest.mark.parametrize("name", ["resnet-ddp-a100", "async-v100", "vllm-b200"])
def test_every_launch_of_a_torch_trace_is_inside_an_operator(name):
    assert build_operator_tree(view_of(name)).coverage > 0.85


@pytest.mark.parametrize(
    "name",
    [
        *("vllm-b200", "tl-vllm-decode-full", "tl-vllm-piecewise", "tl-sglang-prefilldecode", "tl-xdit-flux-aiter"),
        *("resnet-mi300", "resnet50-v100-nw0", "switch-moe", "tl-h100-timesformer", "tl-mi300-qwen", "nsys-a2a-2gpu"),
        *("tl-jax-mi300-attn08", "tl-jax-te-fused-attn", "xprof-gpu-multi-worker", "async-v100", "dlrm-8xV100"),
    ],
)
def test_the_table_knows_the_kernels_of_real_traces(name):
    assert sum(kernel.share for kernel in list_unclassified(view_of(name))) < 0.01


def test_copies_of_xla_on_rocm_are_copies():
    names = {
        view.table.names[name_id]
        for view in view_of("tl-jax-mi300-attn08").ranks.values()
        for name_id in view.table.name_id[view.copy_rows].tolist()
    }
    assert any("copyBuffer" in name or "Copy" in name for name in names)


def test_families_of_wrapped_kernels_name_their_operation():
    inputs = measure("tl-jax-te-fused-attn", "top_kernels").inputs
    assert "ck_tile::kentry<ck_tile::FmhaBwdDQDKDVKernel>" in str(inputs["kernels"])
