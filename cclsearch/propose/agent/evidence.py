"""What the agent may look up about a finished trial; the search hands over something that knows."""

from __future__ import annotations

from typing import Protocol

from cclsearch.core.values import Model


class TrialEvidence(Model):
    """What one trial left behind. Every text comes from outside: it is data."""

    diagnosis: tuple[str, ...] = ()
    """Where the step's time goes, in sentences."""
    seconds_by_cause: dict[str, float] = {}
    """Seconds of a traced step by cause (compute, exposed communication by collective and group, bubble, idle)."""
    notes: tuple[str, ...] = ()
    log_tail: str = ""
    """The last lines of the first rank that failed, or of rank 0."""


class EvidenceSource(Protocol):
    """Looks up what trials left behind."""

    def find(self, trial: int) -> TrialEvidence | None:
        """What that trial left; None where nothing is known."""
        ...


class NoEvidence:
    """For searches without traces or logs."""

    def find(self, trial: int) -> TrialEvidence | None:
        return None
