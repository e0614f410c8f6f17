"""Why a job failed, from its ranks' failure files and its logs."""

from __future__ import annotations

import json
import math

import pytest

from cclsearch.core.values import FailureKind
from cclsearch.launch.collect import collect_result
from cclsearch.launch.log_reader import read_log
from cclsearch.tasks.training.contract import TrainingResult

CUDA_OOM = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 10, in <module>
[rank3]:     step()
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of 39.39 GiB
[rank0]: Traceback (most recent call last):
[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
"""
PEER_FIRST = """\
[rank0]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234
[rank1]: RuntimeError: The size of tensor a (4) must match the size of tensor b (8) at non-singleton dimension 1
"""
CPU_OOM = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 67108864 bytes. Error code 12 (Cannot allocate memory)"
)
TPU_OOM = (
    "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
    "memory space hbm. Used 18.40G of 15.48G hbm."
)

AGENT_LOG = "".join(
    f"E1122 19:05:17.761000 18878 torch/distributed/elastic/multiprocessing/api.py:836] {line}\n"
    for line in (
        "torch.multiprocessing.spawn.ProcessRaisedException: ",
        "-- Process 0 terminated with the following error:",
        '  File "train.py", line 9, in train',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.",
    )
)
AGENT_SUMMARY = """\
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  traceback : Traceback (most recent call last):
    File "train.py", line 9, in train
      raise ValueError("the batch is odd")
  ValueError: the batch is odd

============================================================
"""


LOGS: list[tuple[str, FailureKind, int | None, str]] = [
    (AGENT_LOG, FailureKind.OUT_OF_MEMORY, 0, "OutOfMemoryError: CUDA out of memory"),
    (AGENT_SUMMARY, FailureKind.CRASHED, 0, "ValueError: the batch is odd"),
    (CUDA_OOM, FailureKind.OUT_OF_MEMORY, 3, "Tried to allocate 2.50 GiB"),
    (PEER_FIRST, FailureKind.CRASHED, 1, "The size of tensor a"),
    (CPU_OOM, FailureKind.OUT_OF_MEMORY, None, "67108864"),
    (TPU_OOM, FailureKind.OUT_OF_MEMORY, None, "18.40G"),
    ("[rank1]: torch.distributed.DistBackendError: NCCL error in: x", FailureKind.COMMUNICATION, 1, "NCCL error"),
    ("OSError: [Errno 28] No space left on device: 'x'", FailureKind.LAUNCHER, None, "No space left"),
    ("terminate called after throwing an instance of 'std::bad_alloc'", FailureKind.OUT_OF_MEMORY, None, "bad_alloc"),
    ("[rank1]: RuntimeError: \n[rank1]: \n[rank1]:     An attempt", FailureKind.CRASHED, 1, "RuntimeError: An attempt"),
]


@pytest.mark.parametrize(("log", "kind", "rank", "words"), LOGS)
def test_the_root_failure_is_found_in_logs(log, kind, rank, words):
    failure = read_log(log)
    assert (failure.kind, failure.rank) == (kind, rank)
    assert words in failure.message


def test_a_log_without_exception_has_no_failure():
    assert read_log("step 1 loss 4.2\nINFO: no Error here at all\n") is None


def test_the_first_rank_that_failed_by_itself_counts(tmp_path):
    (tmp_path / "failures").mkdir()
    records = [
        {"rank": 0, "time_ns": 1, "kind": "communication", "message": "RuntimeError: Connection closed by peer"},
        {"rank": 2, "time_ns": 3, "kind": "crashed", "message": "ValueError: later"},
        {"rank": 1, "time_ns": 2, "kind": "out_of_memory", "message": "RuntimeError: can't allocate memory"},
    ]
    for record in records:
        (tmp_path / "failures" / f"rank-{record['rank']}.json").write_text(json.dumps(record))
    (tmp_path / "failures" / "rank-9.json").write_text("{torn")
    failure = collect_result(tmp_path, TrainingResult, exit_code=1)
    assert (failure.kind, failure.rank) == (FailureKind.OUT_OF_MEMORY, 1)


@pytest.mark.parametrize(
    ("log", "kind", "words"),
    [
        ("failed (exitcode: -9) local_rank: 2 (pid: 98) of binary: /w/python", FailureKind.CRASHED, "memory runs out"),
        (
            "[rank2]: RuntimeError: CUDA error: uncorrectable ECC error",
            FailureKind.NODE_FAILED,
            "hardware of a node is",
        ),
        ("[rank2]: torch.OutOfMemoryError: CUDA out of memory.", FailureKind.OUT_OF_MEMORY, "CUDA out of memory"),
        ("[rank2]: RuntimeError: Connection closed by peer", FailureKind.COMMUNICATION, "said the rank"),
    ],
)
def test_a_cause_in_the_log_counts_before_ranks_that_lost_their_peers(tmp_path, log, kind, words):
    (tmp_path / "failures").mkdir()
    record = {"rank": 0, "time_ns": 1, "kind": "crashed", "message": "said the rank: Connection closed by peer"}
    (tmp_path / "failures" / "rank-0.json").write_text(json.dumps(record))
    (tmp_path / "stderr.log").write_text(f"{log}\n")
    failure = collect_result(tmp_path, TrainingResult, exit_code=1)
    assert (failure.kind, failure.rank) == (kind, 0 if kind is FailureKind.COMMUNICATION else 2)
    assert words in failure.message


def test_the_kind_of_a_crashed_rank_is_read_from_its_message(tmp_path):
    for text, kind in (
        ("RuntimeError: NCCL error in: x\nLast error:\nCuda failure 2 'out of memory'", FailureKind.OUT_OF_MEMORY),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", FailureKind.NODE_FAILED),
        ("ModuleNotFoundError: No module named 'torch'", FailureKind.LAUNCHER),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", FailureKind.CRASHED),
    ):
        failure = {"stage": "run", "kind": "crashed", "message": text}
        (tmp_path / "result.json").write_text(json.dumps({"status": "failed", "failure": failure}))
        assert collect_result(tmp_path, TrainingResult).kind is kind


NUMBER, WHOLE = "Input should be a valid number", "Input should be a valid integer"
NOT_FIGURES = [
    ("step_times_s", "[0.5, true]", f"step_times_s.1: {NUMBER} (True)"),
    ("step_times_s", '["0.5"]', f"step_times_s.0: {NUMBER} ('0.5')"),
    ("step_times_s", "[1e300]", "step_times_s.0: Input should be less than or equal to 1000000000 (1e+300)"),
    ("step_times_s", "[1e-300]", "step_times_s.0: Input should be greater than or equal to 0.000000001 (1e-300)"),
    ("step_times_s", "[-1]", "step_times_s.0: Input should be greater than or equal to 0.000000001 (-1)"),
    ("step_times_s", "[NaN]", "step_times_s.0: Input should be "),
    ("energy_j", "0", "energy_j: Input should be greater than 0 (0)"),
    ("energy_j", "-3.5", "energy_j: Input should be greater than 0 (-3.5)"),
    ("energy_j", "Infinity", "energy_j: Input should be a finite number (inf)"),
    ("energy_j", '"120"', f"energy_j: {NUMBER} ('120')"),
    ("peak_memory_bytes", "[1, -1]", "peak_memory_bytes.1: Input should be greater than or equal to 0 (-1)"),
    ("peak_memory_bytes", "[true]", f"peak_memory_bytes.0: {WHOLE} (True)"),
    ("peak_memory_bytes", "[1.5]", f"peak_memory_bytes.0: {WHOLE} (1.5)"),
    ("world_size", '"4"', f"world_size: {WHOLE} ('4')"),
    ("world_size", "0", "world_size: Input should be greater than or equal to 1 (0)"),
    ("global_batch_size", "7.5", f"global_batch_size: {WHOLE} (7.5)"),
    ("num_params", "-1", "num_params: Input should be greater than or equal to 1 (-1)"),
    ("warmup_steps", "true", f"warmup_steps: {WHOLE} (True)"),
    ("foreign_cpu_cores", "-0.5", "foreign_cpu_cores: Input should be greater than or equal to 0 (-0.5)"),
    ("losses", "[true]", f"losses.0: {NUMBER} (True)"),
    ("metrics", '{"a": "1"}', f"metrics.a: {NUMBER} ('1')"),
    ("recorded", '"no"', "recorded: Input should be a valid boolean ('no')"),
    ("failure", '{"stage": "run", "kind": "crashed", "message": "", "rank": "3"}', f"failure.rank: {WHOLE} ('3')"),
]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "violates the trial contract"),
        ('{"status": "ok", "speed": 3}', "speed"),
        ('{"status": "perhaps"}', "status"),
        ('{"status": "failed"}', "but no `failure`"),
        ('{"status": "ok", "schema_version": 9}', "schema_version 9"),
        ("", "not JSON"),
        ("[" * 100000, "not JSON"),
        ('{"status": "ok", "world_size": NaN}', "world_size"),
        *((f'{{"status": "ok", "{name}": {value}}}', words) for name, value, words in NOT_FIGURES),
    ],
)
def test_an_invalid_result_is_a_failure_with_a_reason(tmp_path, text, words):
    (tmp_path / "result.json").write_text(text)
    failure = collect_result(tmp_path, TrainingResult)
    assert failure.kind is FailureKind.CRASHED
    assert words in failure.message


def test_whole_numbers_count_whether_a_script_writes_them_with_a_point_or_without(tmp_path):
    given = {"step_times_s": [1, 2], "energy_j": 3, "losses": [math.nan, 2], "metrics": {"a": 4, "b": math.inf}}
    counts = {"world_size": 4.0, "peak_memory_bytes": [2.0e9, 0], "warmup_steps": 2.0, "num_params": 1e9}
    (tmp_path / "result.json").write_text(json.dumps({"status": "ok", **given, **counts}))
    result = collect_result(tmp_path, TrainingResult)
    assert (result.step_times_s, result.energy_j, result.losses[1]) == ((1.0, 2.0), 3.0, 2.0)
    assert (result.world_size, result.peak_memory_bytes, result.num_params) == (4, (2_000_000_000, 0), 10**9)
    assert type(result.world_size) is int


def test_a_signal_is_recognized_by_a_shells_exit_code(tmp_path):
    (tmp_path / "exit_code").write_text("137\n")
    (tmp_path / "stderr.log").write_text("Killed\n")
    failure = collect_result(tmp_path, TrainingResult)
    assert "SIGKILL" in failure.message


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (b"train.py: no such dataset\n=======\n\n", "its last line on stderr: train.py: no such dataset"),
        (b"ValueError: \x1b[31mred\x1b[0m \xff and \x07 bell\n", "ValueError: red \ufffd and bell"),
    ],
    ids=["the last line with words", "without control characters"],
)
def test_a_log_is_quoted_as_one_readable_line(tmp_path, log, message):
    (tmp_path / "stderr.log").write_bytes(log)
    assert collect_result(tmp_path, TrainingResult, exit_code=1).message.endswith(message)


@pytest.mark.parametrize(
    "kind",
    ["allocation_ended", "preempted", "node_failed", "cancelled", "judging_error"],
)
def test_a_job_that_reports_what_only_its_launcher_can_know_has_crashed(tmp_path, kind):
    failure = {"stage": "run", "kind": kind, "message": "said the job"}
    (tmp_path / "result.json").write_text(json.dumps({"status": "failed", "failure": failure}))
    in_result = collect_result(tmp_path, TrainingResult)
    (tmp_path / "result.json").unlink()
    (tmp_path / "failures").mkdir()
    report = {"rank": 0, "time_ns": 1, "kind": kind, "message": "said the job"}
    (tmp_path / "failures" / "rank-0.json").write_text(json.dumps(report))
    of_rank = collect_result(tmp_path, TrainingResult)
    for found in (in_result, of_rank):
        assert (found.kind, found.message) == (FailureKind.CRASHED, "said the job")
