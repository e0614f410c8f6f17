"""Compare the answers of servers: they are greedy, so all trials agree, up to near ties between two tokens."""

from __future__ import annotations

from collections.abc import Sequence

from cclsearch.scoring.agreement import Deviation, Measure
from cclsearch.space.framework import Framework
from cclsearch.tasks.serving.contract import ServingInput, ServingResult

MAX_COMPARED = 64
"""Number of requests whose answers are compared, spread evenly over the first load."""
MAX_FIRST_TOKENS = 0.5
"""Share of the first tokens that may differ where the framework declares no bound for whole answers."""
_DIGEST = 2**31


class SameAnswers:
    """Compares the answers to the requests of the first load, which are the same in every trial of a search.

    A value is the id of the answer's first token, plus a fraction that is a digest of the whole answer.
    """

    rule = "same_answers"
    values = "answers"
    deviation = "share of other answers"
    tolerated = frozenset({"load", "window", "constraints"})

    def read(self, payload: ServingInput, result: ServingResult) -> tuple[float, ...]:
        found = {r.number: r for r in result.requests if r.load == 0 and not r.is_warm_up and not r.error}
        values = []
        for number in choose_requests(len(payload.requests)):
            record = found.get(number)
            if record is None or record.first_token_id is None or record.token_ids_sha256 is None:
                return ()
            values.append(record.first_token_id + int(record.token_ids_sha256, 16) % _DIGEST / _DIGEST)
        return tuple(values)

    def kind(self, payload: ServingInput) -> str:
        return payload.precision

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
        number = choose_requests(len(payload.requests))[index]
        first, digest = int(value), int(value % 1 * _DIGEST)
        return f"{first}:{digest:08x} is the first token and digest of answer {number}"


def choose_requests(count: int) -> list[int]:
    """Numbers of the requests that are compared."""
    return sorted({n * count // MAX_COMPARED for n in range(MAX_COMPARED)}) if count else []


def count_others(mine: Sequence[float], others: Sequence[float]) -> Deviation:
    """The share of the answers that are not the same."""
    differing = [n for n, (a, b) in enumerate(zip(mine, others, strict=True)) if a != b]
    return Deviation(len(differing) / len(mine), differing[0]) if differing else Deviation()


def count_other_firsts(mine: Sequence[float], others: Sequence[float]) -> Deviation:
    """Return the share of answers with another first token; a note counts the answers that differ later."""
    differing = [n for n, (a, b) in enumerate(zip(mine, others, strict=True)) if int(a) != int(b)]
    later = sum(a != b for a, b in zip(mine, others, strict=True)) - len(differing)
    note = f" in their first tokens; {later} of {len(mine)} differ later"
    return Deviation(len(differing) / len(mine), differing[0] if differing else 0, note)
