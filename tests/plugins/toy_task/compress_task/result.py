"""What a run script of the task reports, its metrics, and the check that the work was done."""

from __future__ import annotations

from statistics import median

from cclsearch.launch.contract import TrialResult
from cclsearch.scoring.derive import derive_general, relative_spread
from cclsearch.scoring.evidence import Evidence
from cclsearch.scoring.outcome import Verdict


class CompressResult(TrialResult):
    """`result.json`: the fields of every task, and these."""

    input_bytes: int | None = None
    """Bytes that were compressed, counted after they were restored."""
    input_sha256: str | None = None
    """SHA-256 of the restored bytes."""
    output_bytes: int | None = None
    pass_times_s: tuple[float, ...] = ()
    """Seconds of each timed pass over all bytes."""
    latency_p99_s: float | None = None
    """99th percentile of the seconds in which a chunk was compressed."""


def measure(evidence: Evidence) -> tuple[dict[str, float], float | None]:
    """The metrics of a trial, and the relative spread of its passes."""
    result, metrics = evidence.result, derive_general(evidence)
    assert isinstance(result, CompressResult)
    if not (result.input_bytes and result.output_bytes and result.pass_times_s):
        return metrics, None
    metrics["throughput_mb_s"] = result.input_bytes / 1e6 / median(result.pass_times_s)
    metrics["compression_ratio"] = result.input_bytes / result.output_bytes
    if result.latency_p99_s is not None:
        metrics["latency_p99_s"] = result.latency_p99_s
    return metrics, relative_spread(result.pass_times_s)


def check_bytes(evidence: Evidence) -> Verdict:
    """Whether the card's bytes were compressed: all of them, and no others."""
    rule, result, card = "compressed_bytes", evidence.result, evidence.card
    assert isinstance(result, CompressResult)
    if not evidence.is_measured:
        return Verdict(rule=rule, ok=None, detail=f"{evidence.provenance.value}: nothing was compressed here")
    wanted = card.number("total_mib") * 2**20
    if result.input_bytes != wanted:
        detail = f"{result.input_bytes} bytes were compressed, but {wanted} in the card"
        return Verdict(rule=rule, ok=False, detail=detail)
    if result.input_sha256 != card.work["sha256"]:
        detail = "the compressed bytes do not have the card's SHA-256"
        return Verdict(rule=rule, ok=False, detail=detail)
    return Verdict(rule=rule, ok=True, detail=f"{wanted} bytes with the card's SHA-256")
