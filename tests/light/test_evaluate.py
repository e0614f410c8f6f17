"""Evaluation: metrics computed by hand, failures that stay failures, and constraints that exclude a trial."""

from __future__ import annotations

import pytest
from test_admission import RESULT, TRACE
from test_admission import judge as judge_result

from cclsearch.core.values import Failure, FailureKind, Provenance, Stage
from cclsearch.launch.contract import RunStatus
from cclsearch.scoring.evaluate import evaluate_failure
from cclsearch.scoring.outcome import Outcome
from cclsearch.tasks.training.contract import TrainingResult


def judge(result: TrainingResult = RESULT, objective: str = "step_time", **fields: object) -> Outcome:
    return judge_result(result, objective, **fields)


def test_metrics_match_the_example_computed_by_hand():
    energy = RESULT.model_copy(update={"step_times_s": (0.5,) * 5, "energy_j": 6553.6})
    metrics = judge(energy).metrics
    # 32 x 1024 tokens in 0.5 s on 16 accelerators; 30 of 40 GiB used
    assert metrics["tokens_per_s"] == 65_536
    assert metrics["tokens_per_s_per_accelerator"] == 4096
    assert metrics["samples_per_s"] == 64
    assert metrics["accelerator_seconds_per_mtoken"] == pytest.approx(244.140625)
    assert metrics["energy_j_per_mtoken"] == pytest.approx(200_000)
    assert metrics["power_w"] == pytest.approx(13_107.2)
    assert metrics["memory_headroom_frac"] == pytest.approx(0.25)
    # PaLM's 6N + 12LHS: 6 x (8.0303e9 - 0.5253e9) + 12 x 32 x 4096 x 1024 = 4.664e10 a token, over 312 TFLOP/s
    assert metrics["mfu"] == pytest.approx(4096 * 4.664e10 / 312e12, rel=1e-3)


@pytest.mark.parametrize(
    ("times_s", "median_s", "deviation_s"),
    [((1.0, 1.1, 0.9, 1.2, 1.05), 1.05, 0.05), ((1.0, 1.2), 1.1, 0.1)],
)
def test_the_step_time_is_the_median_and_the_spread_its_robust_deviation(times_s, median_s, deviation_s):
    outcome = judge(RESULT.model_copy(update={"step_times_s": times_s}))
    assert outcome.metrics["step_time_s"] == pytest.approx(median_s)
    assert outcome.spread == pytest.approx(1.4826 * deviation_s / median_s)


def test_one_step_has_no_spread():
    assert judge(RESULT.model_copy(update={"step_times_s": (1.0,)})).spread is None


def test_memory_of_a_cpu_process_gives_no_accelerator_headroom():
    metrics = judge(RESULT.model_copy(update={"memory_kind": "rss"})).metrics
    assert metrics["peak_memory_gib"] == 30
    assert "memory_headroom_frac" not in metrics


def test_a_failed_run_keeps_its_own_reason():
    reason = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="CUDA out of memory", rank=3)
    outcome = judge(TrainingResult(status=RunStatus.FAILED, failure=reason, peak_memory_bytes=(40 * 2**30,)))
    assert outcome.failure == reason
    assert outcome.loss is None
    assert outcome.metrics == {"peak_memory_gib": 40.0}


@pytest.mark.parametrize("times", [(), (1.0, 0.0, 1.0), (-1.0,), (float("nan"),) * 5, (float("inf"),) * 5])
def test_success_without_usable_step_times_is_a_failure(times):
    outcome = judge(RESULT.model_copy(update={"step_times_s": times}))
    assert "must be finite and above 0" in outcome.failure.message


def test_a_failure_without_a_result_or_a_peak_has_no_metrics():
    reason = Failure(stage=Stage.RUN, kind=FailureKind.TIMEOUT, message="too slow")
    silent = TrainingResult(status=RunStatus.FAILED, failure=reason)
    for result in (None, silent):
        outcome = evaluate_failure(reason, Provenance.MEASURED, result)
        assert (outcome.failure, outcome.metrics) == (reason, {})


def test_a_failure_without_a_reason_says_so():
    outcome = judge(TrainingResult(status=RunStatus.FAILED))
    assert outcome.failure.message == "the run script reported a failure without a reason"


def test_only_different_work_is_a_failure_other_violations_only_exclude():
    uneven = judge(RESULT.model_copy(update={"step_times_s": (1.0, 1.9, 0.6, 1.4, 0.8)}))
    assert (uneven.failure, uneven.loss, uneven.is_ranked) == (None, None, False)
    other = judge(RESULT.model_copy(update={"world_size": 8, "seq_len": 512}))
    assert other.failure.kind is FailureKind.WORK_MISMATCH
    assert other.failure.message == ("sequence length is 512, but 1024 in the card; 8 ranks ran, but 16 were requested")
    assert (other.loss, other.metrics["tokens_per_s"]) == (None, 32 * 512), "its metrics are kept"
    assert judge().is_ranked


@pytest.mark.parametrize("energy_j", [0.0, -1.0, float("nan"), None])
def test_impossible_energy_is_not_a_measurement(energy_j):
    metrics = judge(RESULT.model_copy(update={"energy_j": energy_j})).metrics
    assert not {"energy_j_per_step", "energy_j_per_mtoken", "power_w"} & set(metrics)
    assert judge(RESULT.model_copy(update={"energy_j": 0.5})).metrics["energy_j_per_step"] == 0.5


def test_a_missing_metric_fails_the_trial_with_its_reason():
    outcome = judge(objective="energy")
    assert "no power was recorded" in outcome.failure.message
    assert outcome.loss is None
    assert outcome.metrics["step_time_s"] == 1.0


def test_the_trial_without_a_baseline_is_the_baseline():
    first = judge(objective="composite")
    assert first.loss == pytest.approx(1.0)
    faster = RESULT.model_copy(update={"step_times_s": (0.5, 0.51, 0.49, 0.5, 0.52)})
    second = judge(faster, "composite", baseline=first.metrics, trace=TRACE.model_copy(update={"step_time_s": 0.6}))
    assert second.loss == pytest.approx(1 / (0.5 * 2 + 0.5))


def test_a_violated_constraint_excludes_a_trial_from_the_ranking(tmp_path):
    path = tmp_path / "roomy.yaml"
    path.write_text(
        "version: 1\nmetrics: [{name: step_time_s, direction: minimize}]\n"
        "constraints: [{metric: memory_headroom_frac, at_least: 0.3}]\n",
        encoding="utf-8",
    )
    outcome = judge(objective=str(path))
    assert not outcome.is_ranked
    assert outcome.admission.reasons == ("constraints: memory_headroom_frac must be at least 0.3 fraction; it is 0.25",)


def test_a_metric_that_is_not_finite_is_left_out_with_a_note():
    outcome = judge(RESULT.model_copy(update={"metrics": {"overlap": float("nan"), "stalls": 2.0}}))
    assert "overlap" not in outcome.metrics
    assert outcome.metrics["stalls"] == 2.0
    assert any("overlap is not finite" in note for note in outcome.notes)


def test_diagnosis_and_notes_of_the_traces_are_kept():
    trace = TRACE.model_copy(
        update={"diagnosis": ("bound by the all-reduce",), "seconds_by_cause": {"compute": 0.7, "exposed": 0.45}}
    )
    outcome = judge(trace=trace)
    assert outcome.diagnosis == ("bound by the all-reduce",)
    assert sum(outcome.seconds_by_cause.values()) == pytest.approx(1.15)
