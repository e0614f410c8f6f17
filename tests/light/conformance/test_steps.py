"""Steps of public traces, against the extents of the device work that they launched (counted from the JSON itself)."""

from __future__ import annotations

import gzip
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_traces import FOLDER, measure, needs_traces, view_of

from cclsearch.trace.diagnosis.causes import Cause
from cclsearch.trace.score import diagnose_trace
from cclsearch.trace.whatif.projection import Scenario, prepare_replay

pytestmark = needs_traces


@cache
def extent_of_step(path: Path, marker: str) -> tuple[float, float]:
    """Return length in ms, and idle share, of the device work that was launched inside the one marker of that name."""
    events: list[dict[str, Any]] = [
        e for e in msgspec.json.decode(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"
    ]
    calls = {
        e["args"]["correlation"]: float(e["ts"])
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    marks = [e for e in events if e.get("cat") == "user_annotation" and re.match(marker, e["name"])]
    assert len(marks) == 1
    start, end = marks[0]["ts"], marks[0]["ts"] + marks[0]["dur"]
    spans = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and start <= calls.get(e["args"].get("correlation"), -1.0) <= end
    )
    busy, reached = 0.0, spans[0][0]
    for begin, stop in spans:
        busy += max(0.0, stop - max(begin, reached))
        reached = max(reached, stop)
    return (reached - spans[0][0]) / 1e3, 1 - busy / (reached - spans[0][0])


@pytest.mark.parametrize(
    ("name", "marker", "length_ms"),
    [
        ("tl-vllm-decode-full", "execute_", 10.74),
        ("tl-vllm-piecewise", "execute_", 156.47),
        ("tl-sglang-prefilldecode", "execute_", 987.3),
        ("tl-h100-timesformer", "ProfilerStep", 160.0),
        ("tl-mi300-qwen", "ProfilerStep", 33.13),
        ("tl-xdit-flux-aiter", "ProfilerStep", 710.6),
        ("vllm-b200", "execute_", 84.49),
    ],
)
def test_one_step_is_the_extent_of_its_device_work(name, marker, length_ms):
    length, idle = extent_of_step(Path(FOLDER) / name / "rank0.json.gz", marker)
    assert length == pytest.approx(length_ms, rel=5e-4)
    step = measure(name, "trace_step_time")
    assert (step.value, step.status) == (pytest.approx(length / 1e3, rel=1e-6), "partial")
    if name != "tl-mi300-qwen":  # its backlog ends inside the window
        assert measure(name, "idle_frac").value == pytest.approx(idle, abs=1e-5)


def test_the_dlrm_step_of_each_rank_is_the_extent_of_its_device_work():
    step = measure("dlrm-8xV100", "trace_step_time")
    for rank, seconds in step.per_rank.items():
        length, _ = extent_of_step(Path(FOLDER) / "dlrm-8xV100" / f"rank{rank}.json.gz", "ProfilerStep")
        assert seconds == pytest.approx(length / 1e3, rel=1e-5)
    idle = measure("dlrm-8xV100", "idle_frac").per_rank
    shares = {rank: round(100 * float(idle[rank] or 0), 1) for rank in range(8)}
    rank_3 = shares.pop(3)
    assert rank_3 == 39.9  # 43.2 over the whole file, which begins with kernels of the step before
    assert list(shares.values()) == [49.3, 34.3, 62.1, 53.6, 55.6, 61.8, 75.8]


def test_engine_markers_of_2026_give_first_token_and_token_times():
    assert measure("tl-sglang-prefilldecode", "ttft").value == pytest.approx(0.987367, rel=1e-5)
    decode = measure("tl-vllm-decode-full", "tpot")
    length, _ = extent_of_step(Path(FOLDER) / "tl-vllm-decode-full" / "rank0.json.gz", "execute_")
    assert decode.value == pytest.approx(length / 1e3, rel=1e-4)


@pytest.mark.parametrize("name", ["hta-2rank-sampled", "switch-moe", "tl-xdit-flux-aiter", "resnet-ddp-a100"])
def test_the_diagnosis_blames_the_host_for_as_much_idle_time_as_idle_cause(name):
    causes = diagnose_trace(view_of(name)).seconds_by_cause
    idle = {cause: causes[cause] for cause in (Cause.HOST_IDLE, Cause.LAUNCH_IDLE, Cause.UNKNOWN_IDLE)}
    shares = measure(name, "idle_cause").inputs["diagnosed"]
    assert isinstance(shares, dict)
    assert idle[Cause.HOST_IDLE] / sum(idle.values()) == pytest.approx(shares["host"], abs=0.03)
    assert idle[Cause.UNKNOWN_IDLE] / sum(idle.values()) == pytest.approx(shares["unknown"], abs=0.03)


def test_devices_that_share_no_collective_are_not_said_to_wait():
    for name in ("xprof-gpu-multi-worker", "nsys-h100-2gpu"):
        diagnosis = diagnose_trace(view_of(name))
        assert diagnosis.seconds_by_cause[Cause.IMBALANCE] == 0
        assert "wait for rank" not in " ".join(diagnosis.sentences)


def test_figures_over_a_part_of_a_trace_say_which_part():
    rate = measure("switch-moe", "gemm_tflops")
    assert (rate.reason, round(float(str(rate.inputs["coverage"])), 4)) == ("no_shapes", 0.0122)
    assert "12 all_reduce" in measure("tpu-v6e-4", "exposed_comm_frac").detail
    assert measure("dlrm-8xV100", "trace_quality").value == pytest.approx(0.984, abs=1e-3)


def test_devices_of_one_report_have_no_fitted_offset():
    assert view_of("nsys-mfu-before").matching.offset_ns == {0: 0, 1: 0}
    assert measure("nsys-mfu-before", "last_arriver").per_rank == {0: 11, 1: 22}


def test_the_replay_says_where_it_deviates_and_what_binds():
    notes = prepare_replay(view_of("jax-cpu4")).time(Scenario()).notes
    assert any("takes 88 % of the measured time" in note for note in notes)
    bound = prepare_replay(view_of("tl-mi300-ddp-resnet18")).time(Scenario(compute=2.0))
    assert abs(bound.gain_high) < 0.005
    assert any("the host's launches bound the step" in note for note in bound.notes)
    whole = prepare_replay(view_of("switch-moe"))
    assert not whole.is_step
    assert whole.time(Scenario(compute=2.0)).gain_low == pytest.approx(0.378, abs=2e-3)


def test_optimizer_steps_and_runs_of_an_xla_program_are_steps():
    resnet = measure("tl-mi300-ddp-resnet18", "trace_step_time")
    assert (resnet.inputs["step_source"], resnet.n_steps) == ("optimizer", 2)
    attention = measure("tl-jax-te-fused-attn", "trace_step_time")
    assert (attention.inputs["step_source"], attention.n_steps) == ("program", 3)
    assert attention.value == pytest.approx(2.524e-3, rel=1e-3)
    assert measure("tl-jax-mi300-attn08", "trace_step_time").reason == "no_step_markers"  # operations one by one
