"""The task `serving` (requests that arrive over time), and the parts that it shares with `inference`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cclsearch.card.fields import look_up
from cclsearch.card.model import Card, StatedCard
from cclsearch.card.task import TASKS
from cclsearch.core.metrics import NUM_ACCELERATORS, PEAK_MEMORY, MetricInfo
from cclsearch.core.values import Config, Failure, FailureKind, Stage
from cclsearch.launch.contract import RunStatus, TrialInput, TrialResult
from cclsearch.scoring.derive import derive_general
from cclsearch.scoring.evidence import Diagnosed
from cclsearch.scoring.objective import Objective
from cclsearch.tasks.base import Task
from cclsearch.tasks.serving import space_rules  # noqa: F401  importing registers its rules
from cclsearch.tasks.serving.admission import ADMISSION_RULES, WORK_RULES, SameAnswers
from cclsearch.tasks.serving.closed_form.kernel_tables import require_kernel_tables
from cclsearch.tasks.serving.closed_form.replica import check_physics
from cclsearch.tasks.serving.contract import (
    Arrival,
    MeasuredLoad,
    ServingEvidence,
    ServingInput,
    ServingResult,
    read_request_log,
)
from cclsearch.tasks.serving.diagnosis import diagnose_load
from cclsearch.tasks.serving.measurements import (
    COLUMNS,
    GENERAL,
    LIMITED,
    LOAD_METRICS,
    OTHER_LOAD,
    OTHER_LOAD_METRICS,
    REPORTED,
    SERVED,
    THROUGHPUT,
    choose_load,
    derive_energy,
    describe_settling,
    measure_load,
    measure_settling,
)
from cclsearch.tasks.serving.trace_files import hash_trace
from cclsearch.tasks.serving.workload import (
    SERVING_FIELDS,
    check_limits,
    check_load,
    check_other_load,
    constrain,
    draw_requests,
    find_arrival,
    find_other_card,
    find_rate,
    is_recorded_load,
    limit_work,
    read_limits,
    read_load_choice,
    read_targets,
    remark_load,
)

if TYPE_CHECKING:
    from cclsearch.space.table import Space
    from cclsearch.stats.closed_form import Predictor


LEARNED = ("concurrency", THROUGHPUT, "ttft_mean_s", "tpot_mean_s")
"""Metrics of each load that the surrogate learns from."""


class RequestTask(Task):
    """Common parts of the two tasks that answer requests."""

    metrics = (*LOAD_METRICS, *GENERAL)
    primary = THROUGHPUT
    rate = "output_tokens_per_s"
    highlights: tuple[str, ...] = ("ttft_p99_s", "ttft_mean_s", "tpot_mean_s", "concurrency", "peak_memory_gib")
    efficiency = ("tpot_mean_s", "ttft_mean_s")
    causes = ("tpot_mean_s", "ttft_mean_s")
    compared = (
        "output_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_s",
        "itl_p99_s", "e2e_p99_s", "kv_cache_use_peak", "preemptions", "queue_mean_s", "tokens_per_step",
        "prefix_cache_hit_rate", "num_accelerators",
    )  # fmt: skip
    per_accelerator = ("num_accelerators", THROUGHPUT, "accelerator_seconds_per_mtoken")
    tuned = "how a server of a large language model uses its accelerators"
    unit_of_work = "load"
    diagnosed_unit = "mean request"
    input = ServingInput
    result = ServingResult
    admission_rules = ADMISSION_RULES
    work_rules = WORK_RULES
    agreement = SameAnswers()
    columns = COLUMNS
    primary_from: tuple[str, ...] = ("output_tokens_per_s",)
    load_effects = frozenset({"asked_load"})

    def constrain(self, card: StatedCard, objective: Objective) -> Objective:
        return constrain(card, objective, {name: self.metric(name).unit for name in LIMITED})

    def freeze(self, card: Card, objective: Objective) -> Card:
        check_limits(card)
        return card.model_copy(update={"work": limit_work(card.work, objective)})

    def make_result(self, card: Card, metrics: Mapping[str, float], **fields: Any) -> TrialResult:
        """As the base class; the metrics are of one load, unless `loads` are given, each by its metrics."""
        general = {name: value for name, value in metrics.items() if name in (PEAK_MEMORY, NUM_ACCELERATORS)}
        if fields["status"] is RunStatus.OK and "loads" not in fields and THROUGHPUT in metrics:
            fields["loads"] = (metrics,)
        fields["loads"] = tuple(map(_read_load, fields.get("loads", ())))
        if NUM_ACCELERATORS in general:
            fields.setdefault("world_size", max(1, round(general.pop(NUM_ACCELERATORS))))
        return super().make_result(card, general, **fields)

    def predictor(self, card: Card, space: Space) -> Predictor | None:
        """Closed forms of throughput and latencies of a load or a batch, and a simulation that refines them."""
        from cclsearch.tasks.serving.closed_form.predictor import make_predictor

        return make_predictor(card, space, self.concurrency_of(card))

    def concurrency_of(self, card: Card) -> float | None:
        """The requests that are at the server at once; None if the card does not say."""
        [field] = self.loads
        return float(card.work[field]) if field in card.work else None

    def read_files(self, folder: Path, result: TrialResult) -> TrialResult:
        assert isinstance(result, ServingResult)
        return read_request_log(folder, result)

    def find_failure(self, result: TrialResult) -> Failure | None:
        assert isinstance(result, ServingResult)
        problem = result.log_problem
        if not problem and not result.loads:
            problem = "it reported no load"
        if not problem:
            return None
        message = f"the run script reported success, but {problem}"
        return Failure(stage=Stage.SCORE, kind=FailureKind.CRASHED, message=message)

    def measure(self, evidence: ServingEvidence) -> tuple[dict[str, float], float | None]:  # type: ignore[override]
        metrics, loads = derive_general(evidence), self.measure_loads(evidence)
        is_other = [load.is_other for load in evidence.result.loads]
        own = [load for load, other in zip(loads, is_other, strict=True) if not other]
        best = self.choose_load(evidence.card, own)
        metrics |= {} if best is None else own[best]
        for load in (load for load, other in zip(loads, is_other, strict=True) if other):
            named = {OTHER_LOAD + name: value for name, value in load.items()}
            metrics |= {m.name: named[m.name] for m in OTHER_LOAD_METRICS if m.name in named}
        return metrics, None

    def diagnose(self, evidence: ServingEvidence) -> Diagnosed:  # type: ignore[override]
        """Return the limits of the load whose metrics are the trial's, then the findings of a trace."""
        traced = super().diagnose(evidence)
        asked, loads = evidence.payload.asked(is_other=False), self.measure_loads(evidence)
        own = [number for number, load in enumerate(evidence.result.loads) if not load.is_other]
        best = self.choose_load(evidence.card, [loads[number] for number in own])
        if best is None or asked is None or not evidence.is_measured:
            return traced
        records = [record for record in evidence.result.requests if record.load == own[best]]
        found = diagnose_load(
            records, loads[own[best]], evidence.payload.config, asked, evidence.payload.shared_prefix_tokens
        )
        settled = describe_settling(loads[own[best]], evidence.result.loads[own[best]].ended_s)
        return Diagnosed((*settled, *found.sentences, *traced.sentences), found.seconds_by_cause)

    def choose_load(self, card: Card, loads: Sequence[Mapping[str, float]]) -> int | None:
        return choose_load(loads, read_limits(card.work), read_load_choice(card.work))

    def complete_recorded(
        self, data: Mapping[str, Any], metrics: Mapping[str, float], accelerators: float
    ) -> dict[str, float]:
        """Throughput per accelerator and per server, and requests per second, follow from one of them."""
        answer, rate = look_up(data, "workload.data.output_len"), metrics.get("output_tokens_per_s")
        if rate is None and THROUGHPUT in metrics:
            rate = metrics[THROUGHPUT] * accelerators
        if rate is None:
            return dict(metrics)
        found = {"output_tokens_per_s": rate, THROUGHPUT: rate / accelerators}
        found |= {"requests_per_s": rate / answer} if answer else {}
        return {**found, **metrics}

    def measure_loads(self, evidence: ServingEvidence) -> list[dict[str, float]]:
        """The metrics of each load: from the request log, or as recorded; never as a script states them itself."""
        result, targets = evidence.result, read_targets(evidence.card.work)
        accelerators = float(result.world_size or evidence.payload.num_ranks)
        known, found = {metric.name for metric in self.metrics}, []
        for number, load in enumerate(result.loads):
            metrics = {name: value for name, value in load.metrics.items() if name in known}
            if evidence.is_measured:
                records = [record for record in result.requests if record.load == number]
                own = {name: value for name, value in metrics.items() if name in REPORTED}
                measured = own | measure_load(records, accelerators, targets)
                measured |= derive_energy(measured)
                measured |= {} if load.request_rate is None else measure_settling(records)
                metrics = {name: value for name, value in measured.items() if name in known}
            if load.concurrency is not None:
                metrics["concurrency"] = float(load.concurrency)
            found.append(metrics)
        return found

    def list_loads(self, evidence: ServingEvidence) -> list[dict[str, float]]:  # type: ignore[override]
        """The latencies and the throughput of each load of a trial that chooses among several."""
        found = zip(self.measure_loads(evidence), evidence.result.loads, strict=True)
        own = [load for load, reported in found if not reported.is_other and "concurrency" in load]
        if len({load["concurrency"] for load in own}) < 2:
            return []
        return [{name: load[name] for name in LEARNED if name in load} for load in own]

    def describe_primary(self) -> str:
        return "output tokens per second and accelerator"


def _read_load(load: MeasuredLoad | Mapping[str, float]) -> MeasuredLoad:
    """The load of a recorded row: without the metrics that are of the whole trial."""
    if isinstance(load, MeasuredLoad):
        return load
    return MeasuredLoad(metrics={n: v for n, v in load.items() if n not in (PEAK_MEMORY, NUM_ACCELERATORS)})


class ServingTask(RequestTask):
    """Serves a decoder-only transformer to clients; latency and throughput of a load are measured."""

    name = "serving"
    metrics = (*RequestTask.metrics, SERVED, *OTHER_LOAD_METRICS)
    highlights = (*RequestTask.highlights, OTHER_LOAD + THROUGHPUT)
    card_fields = SERVING_FIELDS
    loads: Mapping[str, str] = {"concurrency": "concurrency"}
    bench_limits = tuple(f"tpot_mean_s <= {limit / 1e3:g}" for limit in (8, 10, 15, 20, 30, 50))

    def complete_recorded_work(self, work: dict[str, Any], loads: Sequence[Mapping[str, float]]) -> list[str]:
        found = list_concurrencies(loads)
        if not found or {"concurrency", "max_concurrency", "request_rate", "request_trace"} & set(work):
            return []
        work["max_concurrency"] = found[-1]
        said = f"{found[0]} to {found[-1]}" if len(found) > 1 else str(found[0])
        return [f"each trial was measured with {said} requests at once: the load that keeps the limits best counts"]

    def freeze(self, card: Card, objective: Objective) -> Card:
        check_load(card)
        check_other_load(card, objective)
        require_kernel_tables(card)
        card = super().freeze(card, objective)
        check_physics(card)
        if "request_trace" in card.work:
            draw_requests(card, 0)  # a wrong trace stops the search here
            card = card.model_copy(
                update={"work": Config({**card.work, "request_trace_sha256": hash_trace(card.work)})}
            )
        return card

    def make_input(self, card: Card, config: Config, *, is_measured: bool, **fields: Any) -> TrialInput:
        work, seed, other = card.work, int(fields.get("seed", 0)), find_other_card(card)
        own = {
            **_ask_load(card, seed, is_measured=is_measured),
            "other": None if other is None else _ask_load(other, seed, is_measured=is_measured),
            "repeats": work.as_int("repeats"),
            "warmup_requests": work.as_int("warmup_requests", 4),
            "shared_prefix_tokens": work.as_int("shared_prefix_tokens", 0),
            "limits": read_limits(work),
        }
        return super().make_input(card, config, is_measured=is_measured, **own, **fields)

    def concurrency_of(self, card: Card) -> float | None:
        """As the base class; None for requests that come at their times."""
        return super().concurrency_of(card) if find_arrival(card) is Arrival.CLOSED else None

    def other_metric(self, card: Card) -> MetricInfo | None:
        """Throughput of the second load in a closed loop, else the time of its requests: the rate is given."""
        other = find_other_card(card)
        if other is None:
            return None
        return self.metric(OTHER_LOAD + (THROUGHPUT if find_arrival(other) is Arrival.CLOSED else "e2e_mean_s"))

    def share_load(self, card: Card, share: float) -> Card | None:
        rate, clients = find_rate(card), card.work.get("concurrency")
        if rate is not None:
            changed: dict[str, float] = {"request_rate": rate * share, "num_requests": 0}
        elif find_arrival(card) is Arrival.CLOSED and clients and "max_concurrency" not in card.work:
            changed = {"concurrency": max(1, round(float(clients) * share))}
        else:
            return None
        return card.model_copy(update={"work": Config({**card.work, **changed})})

    def describe_load(self, card: Card) -> str:
        rate = find_rate(card)
        return f"{card.work.get('concurrency')} requests at once" if rate is None else f"{rate:.3g} requests/s"

    def remark(self, card: StatedCard) -> list[str]:
        check_load(card)
        if isinstance(card, Card):
            check_physics(card)
        return remark_load(card)

    def describe_work(self, card: Card) -> str:
        """The load: `1024 tokens in and 128 out, 64 requests at once, ttft_p99_s <= 0.5`."""
        work, arrival = card.work, find_arrival(card)
        if is_recorded_load(card):
            return ", ".join([str(work["dataset"]), *describe_limits(work)])
        if arrival is Arrival.TRACE:
            load = f"the request trace {work['request_trace']}"
        elif arrival is Arrival.CLOSED:
            number = f"{work['concurrency']} " if "concurrency" in work else ""
            number = f"up to {work['max_concurrency']} " if "max_concurrency" in work else number
            load = f"{number}requests at once" if number else "requests at once as recorded"
        else:
            load = f"{work.get('request_rate', '?')} requests/s ({arrival.value})"
        spread = "" if work.get("lengths", "fixed") == "fixed" else f" ({work['lengths']})"
        lengths = f"{work.get('input_len', '?')} tokens in and {work.get('output_len', '?')} out{spread}"
        lengths = f"lengths of {work['request_trace']}" if "request_trace" in work else lengths
        other = find_other_card(card)
        then = [] if other is None else [f"then a second load ({self.describe_work(other)})"]
        return ", ".join([*([] if arrival is Arrival.TRACE else [lengths]), load, *describe_limits(work), *then])


def list_concurrencies(loads: Sequence[Mapping[str, float]]) -> list[int]:
    """Return the numbers of requests at once of these loads, ascending."""
    return sorted({int(load["concurrency"]) for load in loads if "concurrency" in load})


def _ask_load(card: Card, seed: int, *, is_measured: bool) -> dict[str, Any]:
    """The fields of `AskedLoad`; a trial that is not measured has no requests."""
    work, arrival = card.work, find_arrival(card)
    most = work.get("max_concurrency") if arrival is Arrival.CLOSED else None
    return {
        "requests": draw_requests(card, seed) if is_measured else (),
        "arrival": arrival,
        "concurrency": work.get("concurrency") if arrival is Arrival.CLOSED and most is None else None,
        "max_concurrency": most,
    }


def describe_limits(work: Config) -> list[str]:
    """The limits in a card's work, as users write constraints."""
    return [
        f"{metric} {sign} {bound:g}"
        for metric, bounds in read_limits(work).items()
        for sign, bound in zip((">=", "<="), bounds, strict=True)
        if bound is not None
    ]


TASKS.register("serving")(ServingTask())
