"""Input and report of a run script of serving or inference, beyond the fields of every task; reads its request log."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, StrictBool, ValidationError

from cclsearch.card.model import ModelArch
from cclsearch.core.job_file import RESULT_BYTES, JobFileError, has_job_file, read_job_bytes
from cclsearch.core.text import one_line
from cclsearch.core.values import Count, Model, Number, PositiveCount, Seconds, Value
from cclsearch.launch.contract import EVIDENCE_FILE, TrialInput, TrialResult, digest_results
from cclsearch.scoring.evidence import EvidenceOf

Moment = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e9)]
"""Seconds since the start of a load, by the load generator's clock."""


class Arrival(StrEnum):
    """Arrival of requests."""

    CLOSED = "closed"
    """A number of clients; each sends its next request when it has the answer to the last."""
    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"
    """With a burstiness: the coefficient of variation of the intervals."""
    TRACE = "trace"
    """Requests at the times of a request trace."""


class PlannedRequest(Model):
    """One request of a load: when it arrives, how long its prompt is, and how many tokens it asks for."""

    arrival_s: Moment = 0.0
    """0 in a closed loop."""
    input_tokens: PositiveCount
    output_tokens: PositiveCount


class AskedLoad(Model):
    """Requests to the server, and the way of sending them."""

    requests: tuple[PlannedRequest, ...]
    """The measured requests in the order of arrival; each repeat of a load has the same."""
    arrival: Arrival
    concurrency: PositiveCount | None = None
    """Clients of a closed loop."""
    max_concurrency: PositiveCount | None = None
    """The script finds the largest concurrency up to this one that keeps the limits."""


class ServingInput(AskedLoad, TrialInput):
    """`config.json` of serving and inference; its own fields of a load describe the first one."""

    arch: ModelArch
    work: dict[str, Value] = Field(default={}, exclude=True)
    """Not written: the script's own fields have its contents."""
    repeats: PositiveCount = 1
    """Number of measurements of each load."""
    warmup_requests: PositiveCount = 1
    """Requests before the measured ones of the first load; they are logged as warm-up."""
    shared_prefix_tokens: Count = 0
    """First tokens that all prompts have in common."""
    limits: dict[str, tuple[Number | None, Number | None]] = {}
    """Metric of a load -> its least and greatest value."""
    other: AskedLoad | None = None
    """A second load, measured once after the first on the same server; the limits do not apply to it."""

    def asked(self, *, is_other: bool) -> AskedLoad | None:
        """The first or the second load."""
        return self.other if is_other else self


class RequestRecord(Model):
    """One line of the request log, `evidence.jsonl`. Times are in seconds since the start of its load."""

    model_config = ConfigDict(extra="ignore")

    load: Count = 0
    """Number of the load in `result.json`, from 0."""
    number: Count
    """Number of the request in `config.json`, from 0."""
    is_warm_up: StrictBool = False
    arrival_s: Moment
    """Planned time of sending; in a closed loop, the real one."""
    sent_s: Moment
    token_times_s: tuple[Moment, ...] = ()
    """Arrival of each token; only the first and the last if the script counts the others."""
    end_s: Moment
    """Time of the complete answer, or of the failure."""
    input_tokens: Count
    """Tokens of the prompt that was sent."""
    output_tokens: Count
    """Tokens of the answer, as counted by the load generator."""
    first_token_id: Annotated[int, Field(ge=0, lt=2**21)] | None = None
    """The answer's first token; missing if the server returns no ids."""
    token_ids_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """SHA-256 of the answer's token ids, in decimal with spaces between; missing if the server returns no ids."""
    error: str = ""
    """Reason of a failure; empty if the server answered."""


class MeasuredLoad(Model):
    """One load of a trial: the requests, and the engine's own report."""

    is_other: StrictBool = False
    """Whether it is the second load (`ServingInput.other`)."""
    concurrency: PositiveCount | None = None
    request_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Requests per second that were asked."""
    ended_s: Seconds | None = None
    """When the script ended requests at a rate that the server had fallen behind: the others were not answered."""
    window_s: Seconds | None = None
    """Seconds from the first arrival to the last end, by a clock other than the log's."""
    metrics: dict[Annotated[str, Field(max_length=200)], Number] = Field(default={}, max_length=1000)
    """Values that the log does not show, such as `preemptions`; for a recorded load, all known values."""


class ServingResult(TrialResult):
    """`result.json` of serving and inference; the metrics are computed from the request log beside it."""

    num_params: PositiveCount | None = None
    """Parameters of the whole model as built."""
    precision: str | None = None
    """Precision of the matrix multiplications."""
    loads: tuple[MeasuredLoad, ...] = ()
    """The loads that were measured, in order."""
    request_log_sha256: str | None = None
    """SHA-256 of the request log."""
    requests: tuple[RequestRecord, ...] = Field(default=(), exclude=True)
    """The request log, which the engine reads."""
    log_problem: str = Field(default="", exclude=True)
    """Fault of the log; empty if there is none."""

    def list_digests(self, payload: ServingInput) -> tuple[str, ...]:
        answers: list[list[str]] = [[] for _ in self.loads]
        for r in sorted((r for r in self.requests if not r.is_warm_up), key=lambda r: r.number):
            answers[r.load].append(f"{r.number} {r.output_tokens} {r.token_ids_sha256}")
        return tuple(map(digest_results, answers))


ServingEvidence = EvidenceOf[ServingInput, ServingResult]


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
