"""The admission gate of serving and inference: whether the server did the work that was asked, under the load asked.

Answers are greedy, so all trials agree, up to near ties between two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cclsearch.card.arch import count_parameters
from cclsearch.core.text import count_of, one_line
from cclsearch.scoring import admission as general
from cclsearch.scoring.admission import MAX_UNSEEN, MAX_UNSEEN_S, Finding, admission_rule
from cclsearch.scoring.agreement import Deviation, Measure
from cclsearch.scoring.outcome import Verdict
from cclsearch.space.framework import Framework
from cclsearch.tasks.serving.contract import (
    Arrival,
    AskedLoad,
    PlannedRequest,
    RequestRecord,
    ServingEvidence,
    ServingInput,
    ServingResult,
)
from cclsearch.tasks.serving.measurements import SERVED, measure_settling
from cclsearch.tasks.serving.settling import KEPT_UP

PARAMETERS_OFF = 0.02
"""Largest relative difference between the built parameters and the card's."""
WINDOW_OFF = 0.05
"""Relative difference between a load's duration in the log and by the other clock, and at least `WINDOW_OFF_S`."""
WINDOW_OFF_S = 0.05
LATE = 0.05
"""Share of the requests of an open loop that may be sent later than `LATE_S` after their arrival."""
LATE_S = 0.1
WORK_RULES = frozenset({"world_size", "requests", "model", "warm_up", "asked_load"})
"""Rules whose violation means that the job did other work than asked."""
NOT_SENT = "no request was sent here"


def list_loads(evidence: ServingEvidence) -> list[list[RequestRecord]]:
    """The measured requests of each load."""
    found: list[list[RequestRecord]] = [[] for _ in evidence.result.loads]
    for record in evidence.result.requests:
        if not record.is_warm_up:
            found[record.load].append(record)
    return found


@admission_rule("requests", unmeasured=NOT_SENT)
def check_requests(evidence: ServingEvidence) -> Finding:
    """Whether the script sent every request of every load once, as long as asked, and got the tokens asked."""
    wrong = next(_find_wrong(evidence), "")
    total = sum(map(len, list_loads(evidence)))
    return not wrong, wrong or f"{total} requests answered, each with the tokens asked"


def _find_wrong(evidence: ServingEvidence) -> Iterator[str]:
    loads = evidence.result.loads
    if not any(not load.is_other for load in loads):
        yield "no load was measured"
    num_other, num_asked = sum(load.is_other for load in loads), int(evidence.payload.other is not None)
    if num_other != num_asked:
        yield f"the second load was measured {num_other} times; {num_asked} were asked"
        return
    for number, records in enumerate(list_loads(evidence)):
        of = f"load {number + 1}: "
        planned = _asked(evidence, number).requests
        if loads[number].ended_s is not None:
            if measure_settling(records).get(SERVED.name, 1.0) >= KEPT_UP:
                yield f"{of}the script ended it early, but the server kept up with it"
            planned, records = planned[: len(records)], [record for record in records if not record.error]
        elif sorted(record.number for record in records) != list(range(len(planned))):
            yield f"{of}{len(records)} requests were logged; each of the {len(planned)} must be once"
            return
        failed = [record for record in records if record.error]
        if failed:
            why = one_line(failed[0].error, 120)
            yield f"{of}{len(failed)} of {len(records)} requests failed, the first with: {why}"
        for record in records:
            asked = planned[record.number]
            for what, got, want in (
                ("prompt", record.input_tokens, asked.input_tokens),
                ("answer", record.output_tokens, asked.output_tokens),
            ):
                if got != want:
                    yield f"{of}the {what} of request {record.number} has {count_of(got, 'token')}; {want} were asked"


def _asked(evidence: ServingEvidence, number: int) -> AskedLoad:
    """The asked load of that number; for a second one that was not asked, the first."""
    asked = evidence.payload.asked(is_other=evidence.result.loads[number].is_other)
    return asked or evidence.payload.asked(is_other=False)  # type: ignore[return-value]


@admission_rule("asked_load", unmeasured=NOT_SENT)
def check_asked_load(evidence: ServingEvidence) -> Finding:
    """Whether requests came as asked: at once up to the asked number, or at their times."""
    said = ""
    for number, (load, records) in enumerate(zip(evidence.result.loads, list_loads(evidence), strict=True), start=1):
        asked = _asked(evidence, number - 1)
        if asked.arrival is Arrival.CLOSED:
            want = min(load.concurrency or 0, len(records))
            most = asked.max_concurrency or asked.concurrency or 0
            got, said = count_at_once(records), f"up to {want} requests at once, as asked"
            if load.concurrency not in range(1 if asked.max_concurrency else most, most + 1):
                return False, f"load {number} has a concurrency of {load.concurrency}; {most} was asked"
            if got != want:
                return False, f"load {number}: at most {got} requests ran at once; {want} were asked"
        elif late := _find_late(asked.requests, number, records):
            return False, late
        else:
            said = "requests were sent at their times"
    return True, said


def _find_late(planned: Sequence[PlannedRequest], number: int, records: list[RequestRecord]) -> str:
    moved = [r for r in records if r.number < len(planned) and abs(r.arrival_s - planned[r.number].arrival_s) > 1e-3]
    if moved:
        return f"load {number}: request {moved[0].number} is logged with another arrival than asked"
    late = sum(record.sent_s - record.arrival_s > LATE_S for record in records)
    if late <= LATE * len(records):
        return ""
    return (
        f"load {number}: {late} of {len(records)} requests were sent more than {LATE_S:g} s late: the load generator"
        " could not keep up"
    )


def count_at_once(records: list[RequestRecord]) -> int:
    """The greatest number of requests that ran at one moment; one that ends as another is sent is not counted twice."""
    moments = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records], key=lambda m: (m[0], m[1]))
    now = most = 0
    for _, step in moments:
        now += step
        most = max(most, now)
    return most


@admission_rule("warm_up", unmeasured=NOT_SENT)
def check_warm_up(evidence: ServingEvidence) -> Finding:
    """Whether requests ran before the measured ones, apart from them."""
    got = sum(record.is_warm_up and not record.error for record in evidence.result.requests)
    want = evidence.payload.warmup_requests
    wrong = "" if got >= want else f"{got} requests warmed up; at least {want} are required before the measured ones"
    return not wrong, wrong or f"{got} requests before the measured ones"


@admission_rule("window")
def check_window(evidence: ServingEvidence) -> Finding:
    """Whether the log's times agree with another clock: the search's, else that of the load generator."""
    known, windows = False, evidence.windows
    for number, (load, records) in enumerate(zip(evidence.result.loads, list_loads(evidence), strict=True)):
        clock_s = windows[number].seconds if number < len(windows) else load.window_s
        if not evidence.is_measured or clock_s is None or not records:
            continue
        known = True
        logged_s = max(r.end_s for r in records) - min(r.arrival_s for r in records)
        most_s = (1 + MAX_UNSEEN) * logged_s + MAX_UNSEEN_S if windows else logged_s + _find_slack(clock_s)
        if not logged_s - _find_slack(clock_s) <= clock_s <= most_s:
            whose = "search's" if windows else "other"
            return (
                False,
                f"load {number + 1} took {clock_s:.3g} s by the {whose} clock, but {logged_s:.3g} s in the log",
            )
    return (True, "the log's times agree with another clock") if known else (None, "no other clock was read")


def _find_slack(window_s: float) -> float:
    return max(WINDOW_OFF * window_s, WINDOW_OFF_S)


@admission_rule("model", unmeasured=NOT_SENT)
def check_model(evidence: ServingEvidence) -> Finding:
    """Whether the card's model was served in the precision asked."""
    result, want = evidence.result, count_parameters(evidence.card.arch)
    wrong = []
    if result.num_params is None:
        wrong.append("the run script did not declare num_params")
    elif abs(result.num_params - want) > PARAMETERS_OFF * want:
        wrong.append(f"{result.num_params:,} parameters, but {want:,} in the card's model")
    if result.precision != evidence.payload.precision:
        wrong.append(f"served in {result.precision or 'no stated precision'}, asked was {evidence.payload.precision}")
    return not wrong, "; ".join(wrong) or f"{want:,} parameters in {evidence.payload.precision}"


ADMISSION_RULES: tuple[Callable[[Any], Verdict], ...] = (
    general.check_provenance,
    check_requests,
    check_model,
    general.check_world_size,
    check_warm_up,
    check_asked_load,
    check_window,
    general.check_timed_window,
    general.check_devices,
    general.check_load,
    general.check_unedited,
)
"""The rules of the gate, in display order."""
MAX_COMPARED = 64
"""Number of requests whose answers are compared, spread evenly over the first load."""
MIN_SHARED = 10
"""Answers from which one that differs is a share."""
MAX_FIRST_TOKENS = 0.5
"""Share of the first tokens that may differ where the framework declares no bound for whole answers."""
_DIGEST = 2**31
NOT_ANSWERED = -1.0
"""In place of an answer that a load that was ended early does not have."""


class SameAnswers:
    """Compares the answers to the requests of the first load, which are the same in every trial of a search.

    A value is the id of the answer's first token, plus a fraction that is a digest of the whole answer.
    """

    rule = "same_answers"
    values = "answers"
    deviation = "share of other answers"
    max_deviation = 0.0
    tolerated = frozenset({"load", "window", "constraints"})

    def read(self, payload: ServingInput, result: ServingResult) -> tuple[float, ...]:
        found = {(r.is_warm_up, r.number): r for r in result.requests if r.load == 0}
        values = []
        for place in _list_compared(payload):
            record = found.get(place)
            if result.loads[0].ended_s is not None and (record is None or record.error):
                values.append(NOT_ANSWERED)
                continue
            if record is None or record.error or record.first_token_id is None or record.token_ids_sha256 is None:
                return ()
            values.append(record.first_token_id + int(record.token_ids_sha256, 16) % _DIGEST / _DIGEST)
        return tuple(values)

    def kind(self, payload: ServingInput) -> str:
        return payload.precision

    def count_known(self, payload: ServingInput) -> int:
        return sum(is_warm_up for is_warm_up, _ in _list_compared(payload))

    def bound(self, framework: Framework, kind: str) -> float | None:
        declared = framework.same_answers.bound(kind)
        return MAX_FIRST_TOKENS if declared is None else declared

    def measure(self, framework: Framework, kind: str) -> Measure:
        return count_other_firsts if framework.same_answers.bound(kind) is None else count_others

    def find_missing(self, framework: Framework, payload: ServingInput, num_values: int) -> str:
        if num_values or framework.same_answers.bound(payload.precision) is None:
            return ""
        return f"the run script reported no token ids of the answers, but {framework.name} declares a bound for them"

    def explain(self, framework: Framework, payload: ServingInput) -> str:
        return framework.same_answers.none or f"{framework.name} declares no bound"

    def describe_value(self, payload: ServingInput, index: int, value: float) -> str:
        is_warm_up, number = _list_compared(payload)[index]
        first, digest = int(value), int(value % 1 * _DIGEST)
        return f"{first}:{digest:08x} is the first token and digest of {'warm-up ' * is_warm_up}answer {number}"


def _list_compared(payload: ServingInput) -> list[tuple[bool, int]]:
    """Return the compared requests, whether they warm up and their numbers: with a nonce, only those are known."""
    warm_up = choose_requests(payload.warmup_requests) if payload.opens_window else []
    return [(True, n) for n in warm_up] + [(False, n) for n in choose_requests(len(payload.requests))]


def choose_requests(count: int) -> list[int]:
    """Numbers of the requests that are compared."""
    return sorted({n * count // MAX_COMPARED for n in range(MAX_COMPARED)}) if count else []


def count_others(mine: Sequence[float], others: Sequence[float]) -> Deviation:
    """The share of the answers that are not the same; one of fewer than `MIN_SHARED` may be a near tie."""
    both = enumerate(zip(mine, others, strict=True))
    differing = [n for n, (a, b) in both if a != b and NOT_ANSWERED not in (a, b)]
    if len(differing) <= (len(mine) < MIN_SHARED):
        return Deviation()
    return Deviation(len(differing) / len(mine), differing[0])


def count_other_firsts(mine: Sequence[float], others: Sequence[float]) -> Deviation:
    """Return the share of answers with another first token; a note counts the answers that differ later."""
    both = enumerate(zip(mine, others, strict=True))
    differing = [n for n, (a, b) in both if int(a) != int(b) and NOT_ANSWERED not in (a, b)]
    later = sum(a != b for a, b in zip(mine, others, strict=True)) - len(differing)
    note = f" in their first tokens; {later} of {len(mine)} differ later"
    return Deviation(len(differing) / len(mine), differing[0] if differing else 0, note)
