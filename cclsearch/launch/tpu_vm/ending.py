"""Why a TPU job that is over left no sound result, from what its workers say and what lies in the trial's folder."""

from __future__ import annotations

from collections.abc import Mapping

from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import RESULT_FILE
from cclsearch.launch.tpu_vm.fleet import WorkerAnswer
from cclsearch.launch.tpu_vm.job import TpuJobRecord


def judge_end(record: TpuJobRecord, by: Mapping[int, WorkerAnswer]) -> Failure | None:
    """Why there is no sound result; None where there is one."""
    if (record.trial_dir / RESULT_FILE).is_file():
        return None
    if any(answer.reason == "timeout" for answer in by.values()):
        message = f"no result after {record.timeout_s:g} s: every process of the trial was ended"
        return Failure(stage=Stage.RUN, kind=FailureKind.TIMEOUT, message=message)
    for process, answer in by.items():
        if answer.oom:
            message = "the kernel killed a process of the trial because memory ran out"
            return Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message=message, rank=process)
    codes = [answer.code for answer in by.values() if answer.code and answer.reason == "finished"]
    found = collect_result(record.trial_dir, exit_code=codes[0] if codes else 0)
    return found if isinstance(found, Failure) else None
