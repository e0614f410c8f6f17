"""Registers the task."""

from __future__ import annotations

import compress_task.space  # noqa: F401  registers knobs and rule
from cclsearch.card.fields import CardField, FieldKind
from cclsearch.card.model import Card
from cclsearch.core.metrics import Direction
from cclsearch.plugins import TASKS
from cclsearch.scoring.admission import GENERAL_RULES
from cclsearch.scoring.catalog import result_metric
from cclsearch.scoring.evidence import Evidence
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Predictor
from cclsearch.tasks.base import Task
from compress_task.prediction import predict
from compress_task.result import CompressResult, check_bytes, measure

LOW, HIGH = Direction.MINIMIZE, Direction.MAXIMIZE


class CompressTask(Task):
    """Compresses the bytes of the card."""

    name = "compress"
    metrics = (
        result_metric("throughput_mb_s", "MB/s", HIGH, "the run script timed no passes", label="throughput"),
        result_metric("latency_p99_s", "s", LOW, "the run script timed no chunks", label="99th percentile latency"),
        result_metric("compression_ratio", "x", HIGH, "the run script reported no sizes", label="compression ratio"),
    )
    primary = "throughput_mb_s"
    highlights = ("latency_p99_s", "compression_ratio")
    card_fields = (
        CardField("total_mib", FieldKind.COUNT, ("workload.data.total_mib",), required=True),
        CardField("sha256", FieldKind.TEXT, ("workload.data.sha256",), required=True),
    )
    needs_model = False
    rules = ("chunks_cover_workers",)
    numbers = {"total_kib": lambda card: card.number("total_mib") * 1024}
    result = CompressResult
    admission_rules = (*GENERAL_RULES, check_bytes)
    work_rules = ("world_size", "compressed_bytes")

    def measure(self, evidence: Evidence) -> tuple[dict[str, float], float | None]:
        """See `Task`."""
        return measure(evidence)

    def predictor(self, card: Card, space: Space) -> Predictor:
        """See `Task`."""
        return predict(card, space, self.metric("throughput_mb_s"), self.metric("latency_p99_s"))

    def describe_work(self, card: Card) -> str:
        """`4 MiB`."""
        return f"{card.work['total_mib']} MiB"


TASKS.register("compress")(CompressTask())
