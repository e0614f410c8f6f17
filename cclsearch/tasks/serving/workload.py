"""The work of serving and inference: fields of a card, and the requests that they describe, equal in every trial."""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

from cclsearch.card.fields import OTHER_WORK_FIELDS, CardField, FieldKind
from cclsearch.card.model import StatedCard
from cclsearch.core.errors import UserError
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.values import Config
from cclsearch.scoring.objective import Constraint, Objective
from cclsearch.tasks.serving.contract import Arrival, PlannedRequest
from cclsearch.tasks.serving.measurements import (
    GOODPUT,
    LATENCIES,
    LATENCY_METRICS,
    LIMITED,
    OTHER_LOAD,
    SERVED,
    THROUGHPUT,
    Bounds,
)
from cclsearch.tasks.serving.settling import KEPT_UP, find_least_s
from cclsearch.tasks.serving.trace_files import MAX_REQUESTS, read_request_trace

AnyCard = TypeVar("AnyCard", bound=StatedCard)
MIN_REQUESTS = 32
LENGTHS = ("fixed", "uniform", "lognormal")
_AT_MOST, _AT_LEAST = "at_most.", "at_least."
_TARGET = "target."
_CHOSEN_BY = "load_chosen_by"
_LIMITS, _TARGETS = "workload.limits.", "workload.targets."


def _data(name: str, kind: FieldKind, maximum: float = 1e8) -> CardField:
    return CardField(name, kind, (f"workload.data.{name}",), maximum=maximum)


LIMIT_FIELDS = (
    *(
        CardField(m.name, FieldKind.NUMBER, (f"{_LIMITS}{m.name}",), maximum=1e9, key=_AT_MOST + m.name)
        for m in LATENCY_METRICS
    ),
    *(
        CardField(name, FieldKind.NUMBER, (f"{_LIMITS}{name}",), maximum=1e12, key=_AT_LEAST + name)
        for name in ("requests_per_s", "output_tokens_per_s_per_user")
    ),
)
"""Latencies are limited from above, rates from below."""
TARGET_FIELDS = tuple(
    CardField(f"{name}_s", FieldKind.NUMBER, (f"{_TARGETS}{name}_s",), maximum=1e9, key=_TARGET + name)
    for name in LATENCIES
)
"""Limits that a single request must keep to count for goodput; `itl_s` is its longest interval between tokens."""
_PRIVATE = (
    _data("repeats", FieldKind.COUNT, maximum=1000),
    _data("shared_prefix_tokens", FieldKind.COUNT0),
    _data("accepted_tokens_per_step", FieldKind.NUMBER, maximum=100),
    *LIMIT_FIELDS,
    *TARGET_FIELDS,
)
INFERENCE_FIELDS = (*OTHER_WORK_FIELDS, *_PRIVATE)
"""One batch of prompts of one length: `batch_size`, `input_len`, `output_len`."""
OTHER = "other_"
"""Begins the names of the fields of a second load."""
OTHER_FIELDS = (
    _data(f"{OTHER}concurrency", FieldKind.COUNT, maximum=MAX_REQUESTS),
    _data(f"{OTHER}request_rate", FieldKind.NUMBER, maximum=1e6),
    _data(f"{OTHER}input_len", FieldKind.COUNT),
    _data(f"{OTHER}output_len", FieldKind.COUNT),
    _data(f"{OTHER}num_requests", FieldKind.COUNT, maximum=MAX_REQUESTS),
)
"""Fields in which the second load differs from the first."""
SERVING_FIELDS = (
    *OTHER_WORK_FIELDS,
    _data("arrival", FieldKind.TEXT),
    _data("concurrency", FieldKind.COUNT, maximum=MAX_REQUESTS),
    _data("max_concurrency", FieldKind.COUNT, maximum=MAX_REQUESTS),
    _data("request_rate", FieldKind.NUMBER, maximum=1e6),
    _data("burstiness", FieldKind.NUMBER, maximum=100),
    _data("lengths", FieldKind.TEXT),
    _data("length_spread", FieldKind.NUMBER, maximum=10),
    _data("num_requests", FieldKind.COUNT0, maximum=MAX_REQUESTS),
    _data("warmup_requests", FieldKind.COUNT, maximum=MAX_REQUESTS),
    _data("request_trace", FieldKind.TEXT),
    _data("dataset", FieldKind.TEXT),
    *OTHER_FIELDS,
    *_PRIVATE,
)
"""A load: arrivals, lengths, number of requests, limits."""


def read_limits(work: Config) -> dict[str, Bounds]:
    """The limits in a card's work: metric -> its least and greatest value."""
    limits: dict[str, Bounds] = {}
    for key, value in work.items():
        for start, place in ((_AT_LEAST, 0), (_AT_MOST, 1)):
            if key.startswith(start):
                bounds = list(limits.get(key.removeprefix(start), (None, None)))
                bounds[place] = float(value)
                limits[key.removeprefix(start)] = (bounds[0], bounds[1])
    return limits


def read_load_choice(work: Config) -> str:
    """Return the metric by which a trial's load is chosen among those it measured: the load with most of it.

    Every ranked metric but goodput either orders the loads as throughput does, or is a latency: that is compared at the
    largest load kept, since the smallest, which is faster, is not the asked one.
    """
    return str(work.get(_CHOSEN_BY, THROUGHPUT))


def read_targets(work: Config) -> dict[str, float]:
    """The targets of single requests: latency -> its greatest value in seconds."""
    return {key.removeprefix(_TARGET): float(value) for key, value in work.items() if key.startswith(_TARGET)}


def constrain(card: StatedCard, objective: Objective, units: dict[str, str | None]) -> Objective:
    """The objective with the card's limits as constraints, unless it bounds a metric as tightly itself; requests that
    arrive at a rate for long enough to settle must also be kept up with."""
    bounded = read_limits(limit_work(Config(), objective))
    added = []
    if can_settle(card) and SERVED.name not in objective.needed_metrics:
        missing = "requests arrive at a rate, which must be kept up with"
        added.append(Constraint(metric=SERVED.name, at_least=KEPT_UP, is_implied=True, missing=missing))
    for metric, (least, most) in read_limits(card.work).items():
        low, high = bounded.get(metric, (None, None))
        least = None if least is None or (low is not None and low >= least) else least
        most = None if most is None or (high is not None and high <= most) else most
        if least is not None or most is not None:
            missing = "the card limits it, and the load was not measured"
            added.append(Constraint(metric=metric, at_least=least, at_most=most, unit=units[metric], missing=missing))
    return objective.model_copy(update={"constraints": (*objective.constraints, *added)}) if added else objective


def limit_work(work: Config, objective: Objective) -> Config:
    """The work with the objective's constraints on metrics of a load as limits, the tighter of two."""
    values = dict(work)
    if GOODPUT in objective.metrics:
        values[_CHOSEN_BY] = GOODPUT
    for constraint in objective.constraints:
        if constraint.metric not in LIMITED:
            continue
        for start, bound, tighter in ((_AT_LEAST, constraint.at_least, max), (_AT_MOST, constraint.at_most, min)):
            if bound is not None:
                key = start + constraint.metric
                values[key] = tighter(float(values.get(key, bound)), bound)
    return Config(values)


def check_limits(card: StatedCard) -> None:
    """Raise UserError for an unknown limit or target, which would be ignored."""
    for section, fields, what in ((_LIMITS, LIMIT_FIELDS, "limit"), (_TARGETS, TARGET_FIELDS, "target")):
        known = [field.name for field in fields]
        for path in card.template:
            name = path.removeprefix(section)
            if name != path and name not in known:
                raise UserError(
                    f"{card.name}: {section}{one_line(name, 60)} is not a {what}{guess_name(name, known)}; known:"
                    f" {', '.join(known)} (further limits: --constraint)"
                )


def require_numbers(card: StatedCard, *names: str) -> None:
    """Raise UserError that names the missing numbers of the card's work."""
    missing = [name for name in names if name not in card.work]
    if missing:
        remedy = " ".join(f"--set {name}=N" for name in missing)
        raise UserError(f"{card.name}: workload.data has no {', '.join(missing)}: give {remedy}")


def check_load(card: StatedCard) -> None:
    """Raise UserError, in one line, if the card's work does not describe a load."""
    work, arrival = card.work, find_arrival(card)
    if is_recorded_load(card) and card.recording is not None:
        return
    if "request_trace" not in work:
        require_numbers(card, "input_len", "output_len")

    def refuse(problem: str) -> None:
        raise UserError(f"{card.name}: {problem}")

    if work.get("lengths", "fixed") not in LENGTHS:
        refuse(f"workload.data.lengths must be one of {', '.join(LENGTHS)}, not {one_line(str(work['lengths']), 40)!r}")
    if arrival is Arrival.CLOSED:
        if "concurrency" not in work and "max_concurrency" not in work:
            refuse(
                "a closed loop has a concurrency, or a max_concurrency, up to which the largest that keeps the limits"
                " is found: --set concurrency=N or --set max_concurrency=N"
            )
    elif arrival is not Arrival.TRACE and "request_rate" not in work:
        refuse(f"requests that arrive {arrival.value} need a rate: --set request_rate=N (requests per second)")
    if arrival is Arrival.TRACE and "request_trace" not in work:
        refuse("arrival is trace, but no request_trace is named: --set request_trace=FILE")
    if int(work.get("shared_prefix_tokens", 0)) >= int(work.get("input_len", 1)):
        refuse("shared_prefix_tokens must be fewer than input_len: each prompt ends with tokens of its own")


def find_other_card(card: AnyCard) -> AnyCard | None:
    """The card with the second load in place of the first, without limits; None if it states none."""
    changed = {name.removeprefix(OTHER): value for name, value in card.work.items() if name.startswith(OTHER)}
    if not changed:
        return None
    replaced = {"num_requests", "max_concurrency"}
    if "request_rate" in changed or "concurrency" in changed:
        replaced |= {"arrival", "concurrency", "request_rate", "request_trace", "burstiness"}
    starts = (OTHER, _AT_MOST, _AT_LEAST)
    kept = {name: v for name, v in card.work.items() if name not in replaced and not name.startswith(starts)}
    return card.model_copy(update={"work": Config({**kept, **changed})})


def check_other_load(card: StatedCard, objective: Objective) -> None:
    """Raise UserError, in one line, if the card's second load cannot be sent, or if the objective needs one."""
    other = find_other_card(card)
    if other is None:
        if needed := [name for name in objective.needed_metrics if name.startswith(OTHER_LOAD)]:
            raise UserError(f"{card.name}: {needed[0]} needs a second load: give --set {OTHER}concurrency=N")
        return
    if card.recording is not None:
        raise UserError(f"{card.name}: a recording cannot be asked for a second load: leave {OTHER}... out")
    if {"concurrency", "request_rate"} <= set(other.work):
        raise UserError(
            f"{card.name}: the second load has {OTHER}concurrency and {OTHER}request_rate: leave one of them out"
        )
    if not {"concurrency", "request_rate"} & set(other.work):
        raise UserError(
            f"{card.name}: the second load needs a concurrency or a rate of its own: --set {OTHER}concurrency=N or"
            f" --set {OTHER}request_rate=N"
        )
    if missing := [f"--set {OTHER}{name}=N" for name in ("input_len", "output_len") if name not in other.work]:
        raise UserError(f"{card.name}: the second load has no lengths: give {' '.join(missing)}")
    try:
        check_load(other)
    except UserError as error:
        raise UserError(f"{error} (of the second load, {OTHER}...)") from None


def is_recorded_load(card: StatedCard) -> bool:
    """Whether the card names a data set in place of lengths: only a recording can answer such a load."""
    return "dataset" in card.work and not {"input_len", "output_len"} & set(card.work)


def find_arrival(card: StatedCard) -> Arrival:
    """Return how requests arrive: as the card states, else inferred from its fields."""
    work = card.work
    stated = str(work.get("arrival", "")).lower()
    if stated and stated not in set(Arrival):
        raise UserError(
            f"{card.name}: workload.data.arrival must be one of {', '.join(Arrival)}, not {one_line(stated, 40)!r}"
        )
    if stated:
        return Arrival(stated)
    if "request_trace" in work:
        return Arrival.TRACE
    has_clients = "concurrency" in work or "max_concurrency" in work
    if has_clients and "request_rate" in work:
        raise UserError(
            f"{card.name}: has a concurrency and a request_rate: say which counts with --set arrival=closed or"
            " --set arrival=poisson"
        )
    return Arrival.POISSON if "request_rate" in work else Arrival.CLOSED


def draw_requests(card: StatedCard, seed: int) -> tuple[PlannedRequest, ...]:
    """The requests of a load: from the card's numbers and the seed only."""
    work, arrival = card.work, find_arrival(card)
    traced = read_request_trace(work, is_timed=arrival is Arrival.TRACE) if "request_trace" in work else ()
    if arrival is Arrival.TRACE:
        return traced
    number = count_requests(work, find_rate(card))
    rng = np.random.default_rng([seed, 20])
    if traced:
        drawn = (traced[n % len(traced)] for n in range(number))
        lengths = list(np.array([(r.input_tokens, r.output_tokens) for r in drawn]).T)
    else:
        require_numbers(card, "input_len", "output_len")
        lengths = [_draw_lengths(rng, work, int(work[name]), number) for name in ("input_len", "output_len")]
    intervals = np.zeros(number)
    if arrival is not Arrival.CLOSED:
        mean_s = 1 / float(work["request_rate"])
        shape = {Arrival.POISSON: 1.0, Arrival.GAMMA: float(work.get("burstiness", 1.0)) ** -2}.get(arrival)
        intervals = np.full(number, mean_s) if shape is None else rng.gamma(shape, mean_s / shape, number)
        intervals[0] = 0.0
    return tuple(
        PlannedRequest(arrival_s=round(float(when), 6), input_tokens=int(given), output_tokens=int(asked))
        for when, given, asked in zip(np.cumsum(intervals), *lengths, strict=True)
    )


def count_requests(work: Config, rate: float | None = None) -> int:
    """The requests of a load that is not a trace: as stated, else as settle at that rate, or four per client."""
    clients = int(work.get("max_concurrency", work.get("concurrency", 1)))
    least = 4 * clients if rate is None else math.ceil(rate * find_least_s(work))
    return int(work.get("num_requests") or min(MAX_REQUESTS, max(least, MIN_REQUESTS)))


def find_rate(card: StatedCard) -> float | None:
    """The requests per second of a load that is not a trace; None for a closed loop."""
    is_open = find_arrival(card) not in (Arrival.CLOSED, Arrival.TRACE)
    return float(card.work["request_rate"]) if is_open and "request_rate" in card.work else None


def can_settle(card: StatedCard) -> bool:
    """Whether requests arrive at a rate for long enough to see if a server keeps up with them: half of what settles."""
    rate = find_rate(card)
    if rate is None or card.recording is not None:
        return False
    return count_requests(card.work, rate) / rate >= find_least_s(card.work) / 2


def remark_load(card: StatedCard) -> list[str]:
    """Lines on how many requests arrive at a rate, and whether these are enough to settle."""
    traced = draw_requests(card, 0) if "request_trace" in card.work and card.recording is None else ()
    if (rate := find_rate(card)) is None:
        if not traced or find_arrival(card) is Arrival.CLOSED:
            return []
        return [f"the load is {len(traced):,} requests in {traced[-1].arrival_s:.3g} s of {card.work['request_trace']}"]
    number, least_s = count_requests(card.work, rate), find_least_s(card.work)
    said = f"the load is {number:,} requests in {number / rate:.3g} s at {rate:g} requests/s"
    if number >= min(rate * least_s, MIN_REQUESTS) and number / rate >= 0.99 * least_s:
        return [said]
    more = ": leave num_requests out, or --set num_requests=0" if card.work.get("num_requests") else ""
    needed = f"{math.ceil(rate * least_s):,} requests ({least_s:.3g} s) settle{more}"
    return [f"{said}: it does not settle, so its latencies are those of a burst; {needed}"]


def _draw_lengths(rng: np.random.Generator, work: Config, mean: int, number: int) -> np.ndarray:
    """Lengths of that mean: all equal, or of a coefficient of variation `length_spread`, at most 4 times the mean."""
    kind, spread = work.get("lengths", "fixed"), float(work.get("length_spread", 0.5))
    if kind == "fixed":
        return np.full(number, mean)
    if kind == "uniform":
        width = math.sqrt(3) * min(spread, 1 / math.sqrt(3))
        drawn = rng.uniform(1 - width, 1 + width, number)
    else:
        sigma = math.sqrt(math.log1p(spread**2))
        drawn = rng.lognormal(-(sigma**2) / 2, sigma, number)
    least = int(work.get("shared_prefix_tokens", 0)) + 1
    return np.clip(np.rint(drawn * mean), min(least, mean), 4 * mean).astype(int)
