"""The task `inference`: batches of requests, all sent at once, one batch after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cclsearch.card.fields import look_up
from cclsearch.card.model import Card
from cclsearch.card.task import TASKS
from cclsearch.core.values import Config
from cclsearch.launch.contract import TrialInput
from cclsearch.scoring.derive import derive_general, relative_spread
from cclsearch.scoring.objective import Objective
from cclsearch.tasks.serving.contract import Arrival, PlannedRequest, ServingEvidence
from cclsearch.tasks.serving.measurements import BATCH_LATENCY, THROUGHPUT
from cclsearch.tasks.serving.task import RequestTask, describe_limits, list_concurrencies
from cclsearch.tasks.serving.workload import INFERENCE_FIELDS, read_limits, require_numbers

BATCHES = 3
"""Timed batches of a trial, unless the card states `repeats`."""


class InferenceTask(RequestTask):
    """Answers one batch of prompts of one length; the time of the batch is measured several times."""

    name = "inference"
    metrics = (*RequestTask.metrics, BATCH_LATENCY)
    highlights = ("batch_latency_s", *RequestTask.highlights)
    card_fields = INFERENCE_FIELDS
    unit_of_work = "batch"
    loads: Mapping[str, str] = {"batch_size": "concurrency"}
    primary_from = ("output_tokens_per_s", BATCH_LATENCY.name)

    def complete_recorded(
        self, data: Mapping[str, Any], metrics: Mapping[str, float], accelerators: float
    ) -> dict[str, float]:
        """The tokens of the answers follow from the size and the time of the batch."""
        answer, seconds = look_up(data, "workload.data.output_len"), metrics.get(BATCH_LATENCY.name)
        batch = metrics.get("concurrency") or look_up(data, "workload.data.batch_size")
        if "output_tokens_per_s" not in metrics and answer and seconds and batch:
            metrics = {**metrics, "output_tokens_per_s": batch * answer / seconds}
        return super().complete_recorded(data, metrics, accelerators)

    def complete_recorded_work(self, work: dict[str, Any], loads: Sequence[Mapping[str, float]]) -> list[str]:
        found = list_concurrencies(loads)
        if not found or "batch_size" in work:
            return []
        work["batch_size"] = found[-1]
        return [
            f"each trial was measured with batches of {found[0]} to {found[-1]}: the best that keeps the limits counts"
        ]

    def freeze(self, card: Card, objective: Objective) -> Card:
        require_numbers(card, "batch_size", "input_len", "output_len")
        return super().freeze(card, objective)

    def make_input(self, card: Card, config: Config, *, is_measured: bool, **fields: Any) -> TrialInput:
        work = card.work
        asked = PlannedRequest(input_tokens=card.number("input_len"), output_tokens=card.number("output_len"))
        own = {
            "requests": (asked,) * card.number("batch_size") if is_measured else (),
            "arrival": Arrival.CLOSED,
            "concurrency": card.number("batch_size"),
            "repeats": work.as_int("repeats", BATCHES),
            "warmup_requests": card.number("batch_size"),
            "shared_prefix_tokens": work.as_int("shared_prefix_tokens", 0),
            "limits": read_limits(work),
        }
        return super().make_input(card, config, is_measured=is_measured, **own, **fields)

    def measure(self, evidence: ServingEvidence) -> tuple[dict[str, float], float | None]:  # type: ignore[override]
        """The medians over the batches: each batch is a measurement of the same work."""
        loads = [metrics for metrics in self.measure_loads(evidence) if THROUGHPUT in metrics]
        if len({metrics.get("concurrency") for metrics in loads}) > 1:  # recorded at several sizes
            return super().measure(evidence)
        if not loads:
            return derive_general(evidence), None
        shared = [name for name in loads[0] if all(name in metrics for metrics in loads)]
        medians = {name: float(np.median([metrics[name] for metrics in loads])) for name in shared}
        return derive_general(evidence) | medians, relative_spread([metrics[THROUGHPUT] for metrics in loads])

    def describe_work(self, card: Card) -> str:
        """The batch: `batch of 128, 1024 tokens in and 128 out`."""
        work = card.work
        batch, given, asked = (work.get(name, "?") for name in ("batch_size", "input_len", "output_len"))
        batch = f"batch of {batch}, {given} tokens in and {asked} out"
        return ", ".join([batch, *describe_limits(work)])


TASKS.register("inference")(InferenceTask())
