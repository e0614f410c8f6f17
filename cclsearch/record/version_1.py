"""Lines of ledgers of version 1 in the form of the present version: what code parsed from texts has a type now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cclsearch.propose.version_1 import read_expected, upgrade_note
from cclsearch.record.event import EndKind, RetryKind

CANCELLED = "cancelled when the search was stopped"
KIND_OF_END = (
    ("the budget is used up", EndKind.BUDGET_USED),
    ("every configuration of the search space", EndKind.SPACE_EXHAUSTED),
    ("the strategy has no", EndKind.NO_PROPOSAL),
    ("the LLM ended the search", EndKind.PROPOSER_ENDED),
    ("stopped by SIG", EndKind.SIGNAL),
    ("the limit of", EndKind.TIME_LIMIT),
    ("the night's deadline", EndKind.TIME_LIMIT),
    ("the allocation", EndKind.ALLOCATION_ENDED),
    ("the reader of the output has gone", EndKind.OUTPUT_CLOSED),
    ("its part of the night's", EndKind.SHARE_USED),
)
"""Start of the reason of an end or a stop -> its kind."""


def upgrade(line: dict[str, Any]) -> dict[str, Any]:
    """The line in the form of the present version; raises ValueError, TypeError or KeyError if it is not an event."""
    match line.get("event"):
        case "note":
            return upgrade_note(line)
        case "trial_proposed":
            return {**line, "expects": read_expected(line.get("expects", {}))}
        case "trial_repeated":
            return {**line, "event": "trial_retried", "kind": _kind_of_retry(line)}
        case "search_stopped" | "search_ended":
            reason = str(line["reason"])
            failed = EndKind.INFRASTRUCTURE_FAILURES if "infrastructure failures" in reason else EndKind.OTHER
            return {**line, "kind": next((kind for start, kind in KIND_OF_END if reason.startswith(start)), failed)}
        case _:
            return line


def _kind_of_retry(line: Mapping[str, Any]) -> RetryKind:
    if line["reason"] == CANCELLED:
        return RetryKind.CANCELLED
    if line.get("failure") is None:
        return RetryKind.DISTURBED
    ended = line["failure"]["kind"] == RetryKind.ALLOCATION_ENDED
    return RetryKind.ALLOCATION_ENDED if ended else RetryKind.FAILURE
