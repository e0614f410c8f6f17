"""The evidence that a finished trial leaves for the agent, and its text for the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cclsearch.core.values import Model
from cclsearch.propose.agent.prompt.quoting import quote_untrusted, quote_untrusted_end

MARKS_BYTES = 80
"""Bytes of the two marks around quoted text and of the line before it."""
MIN_EVIDENCE_BYTES = 100
MAX_EVIDENCE_BYTES = 1500


class TrialEvidence(Model):
    """Evidence of one finished trial on disk. Every text comes from other programs: data, never an instruction."""

    diagnosis: tuple[str, ...] = ()
    """Sentences about the parts of the work and their time."""
    seconds_by_cause: dict[str, float] = {}
    """Seconds by cause (compute, exposed communication, bubble, idle; of a request: queue, prefill, decode, stalls)."""
    notes: tuple[str, ...] = ()
    log_tail: str = ""
    """The last lines of the first rank that failed, or of rank 0."""


class EvidenceSource(Protocol):
    """Finds the evidence of finished trials."""

    def find(self, trial: int) -> TrialEvidence | None:
        """The evidence of that trial; None if there is none."""
        ...

    has_traces: bool
    """Whether `inspect` and `search` may be asked."""

    def inspect(self, trials: Sequence[int], show: str, factors: Sequence[float]) -> str:
        """What the trace of a trial, or of two, shows, as text."""
        ...

    def search(self, words: str) -> str:
        """The lines of the framework's options and of the documentation with all of these words."""
        ...


class NoEvidence:
    """Evidence of a search without traces or logs: none."""

    has_traces = False

    def find(self, trial: int) -> TrialEvidence | None:
        return None

    def inspect(self, trials: Sequence[int], show: str, factors: Sequence[float]) -> str:
        return ""

    def search(self, words: str) -> str:
        return ""


def describe_evidence(
    evidence: TrialEvidence, reference: TrialEvidence | None = None, *, against: str = "the best"
) -> str:
    """Return the diagnosis and the seconds by cause, with differences from the reference trial, named `against`."""
    lines = list(evidence.diagnosis[:12])
    reference_seconds = reference.seconds_by_cause if reference else {}
    for cause, seconds in sorted(evidence.seconds_by_cause.items(), key=lambda item: -item[1])[:12]:
        if seconds == 0 and not reference_seconds.get(cause):
            continue
        difference = (
            f" ({seconds - reference_seconds[cause]:+.4g} s against {against})" if cause in reference_seconds else ""
        )
        lines.append(f"{cause}: {seconds:.4g} s{difference}")
    lines += evidence.notes[:4]
    return "\n".join(lines)


def fit_evidence(diagnosis: str, log: str, max_bytes: int) -> list[str]:
    """Diagnosis and the end of the log, quoted, within the bound.

    The diagnosis gets at most half of the bytes; the log gets the rest.
    """
    diagnosis, log = diagnosis.strip(), log.strip()
    share = max_bytes // (2 if diagnosis and log else 1) - MARKS_BYTES
    if not (diagnosis or log):
        return []
    if share < MIN_EVIDENCE_BYTES:
        return ["(diagnosis and log do not fit into this reply: look this trial up alone)"]
    lines = [quote_untrusted(diagnosis, min(share, MAX_EVIDENCE_BYTES))] if diagnosis else []
    left = max_bytes - sum(len(line.encode()) for line in lines) - MARKS_BYTES
    return lines + (["log tail:", quote_untrusted_end(log, min(left, MAX_EVIDENCE_BYTES))] if log else [])
