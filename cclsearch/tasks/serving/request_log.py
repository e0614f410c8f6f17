"""The request log of a trial: read whole, and refused whole if a line is wrong."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

from pydantic import ValidationError

from cclsearch.core.job_file import RESULT_BYTES, JobFileError, has_job_file, read_job_bytes
from cclsearch.core.text import one_line
from cclsearch.launch.contract import EVIDENCE_FILE
from cclsearch.tasks.serving.contract import RequestRecord, ServingResult


def read_request_log(folder: Path, result: ServingResult) -> ServingResult:
    """The result with the requests of the log beside it; with the problem in their place if it cannot be used."""
    path = folder / EVIDENCE_FILE
    own = {"requests": (), "log_problem": ""}
    if not result.loads or result.recorded or result.simulated or result.caller:
        return result.model_copy(update=own)
    try:
        if not has_job_file(path):
            return result.model_copy(update={**own, "log_problem": f"it wrote no request log {EVIDENCE_FILE}"})
        text = read_job_bytes(path, RESULT_BYTES)
    except JobFileError as error:
        return result.model_copy(update={**own, "log_problem": str(error)})
    if hashlib.sha256(text).hexdigest() != result.request_log_sha256:
        problem = f"{EVIDENCE_FILE} does not have the SHA-256 that result.json states"
        return result.model_copy(update={**own, "log_problem": problem})
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = RequestRecord.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            problem = one_line(f"{EVIDENCE_FILE} line {number}: {field}: {first['msg']}", 200)
            return result.model_copy(update={**own, "log_problem": problem})
        if problem := find_disorder(record, len(result.loads)):
            return result.model_copy(update={**own, "log_problem": f"{EVIDENCE_FILE} line {number}: {problem}"})
        records.append(record)
    return result.model_copy(update={**own, "requests": tuple(records)})


def find_disorder(record: RequestRecord, num_loads: int) -> str:
    """Return an impossible part of a record; empty if there is none."""
    times = (record.sent_s, *record.token_times_s, record.end_s)
    if record.load >= num_loads:
        return f"load {record.load} of {num_loads}"
    if record.sent_s < record.arrival_s:
        return "it was sent before it arrived"
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        return "its times do not ascend from sent to tokens to end"
    counted = len(record.token_times_s)
    if not record.error and counted not in {record.output_tokens, min(record.output_tokens, 2)}:
        return f"it has the times of {counted} of {record.output_tokens} tokens: each one's, or the first and the last"
    return ""
