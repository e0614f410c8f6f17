"""The request log of a trial: read whole, and refused whole if a line is wrong."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from cclsearch.core.job_file import RESULT_BYTES, JobFileError, has_job_file, read_job_bytes
from cclsearch.core.text import one_line
from cclsearch.launch.contract import EVIDENCE_FILE
from cclsearch.tasks.serving.contract import RequestRecord, ServingResult


def read_request_log(folder: Path, result: ServingResult) -> ServingResult:
    """The result with the requests of the log beside it; with the problem in their place if it cannot be used."""
    requests: tuple[RequestRecord, ...] = ()
    problem = ""
    if result.loads and not (result.recorded or result.simulated or result.caller):
        try:
            requests = tuple(_read_records(folder / EVIDENCE_FILE, result))
        except JobFileError as error:
            problem = str(error)
    return result.model_copy(update={"requests": requests, "log_problem": problem})


def _read_records(path: Path, result: ServingResult) -> Iterator[RequestRecord]:
    """Yield the requests of the log; raises JobFileError that says why it cannot be used."""
    if not has_job_file(path):
        raise JobFileError(f"it wrote no request log {EVIDENCE_FILE}")
    text = read_job_bytes(path, RESULT_BYTES)
    if hashlib.sha256(text).hexdigest() != result.request_log_sha256:
        raise JobFileError(f"{EVIDENCE_FILE} does not have the SHA-256 that result.json states")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = RequestRecord.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = f"{EVIDENCE_FILE} line {number}: {'.'.join(map(str, first['loc']))}"
            raise JobFileError(one_line(f"{where}: {first['msg']}", 200)) from None
        if problem := find_disorder(record, len(result.loads)):
            raise JobFileError(f"{EVIDENCE_FILE} line {number}: {problem}")
        yield record


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
