"""The admission rule that binds traces to their trial: for every task whose run scripts write traces."""

from __future__ import annotations

from cclsearch.core.text import count_of
from cclsearch.launch.contract import NONCE_MARK
from cclsearch.scoring.evidence import Evidence
from cclsearch.scoring.outcome import Verdict
from cclsearch.scoring.thresholds import DEFAULT

RULE = "trace_origin"


def check_trace_origin(evidence: Evidence) -> Verdict:
    """Whether the traces are this attempt's: its nonce, times inside it, and no other trial's or rank's content."""
    if not evidence.is_measured or evidence.trace is None or not evidence.trace.origins:
        return Verdict(rule=RULE, ok=None, detail="the trial has no traces")
    wrong = _find_foreign_nonce(evidence) or _find_copy(evidence) or _find_wrong_time(evidence)
    if wrong:
        return Verdict(rule=RULE, ok=False, detail=wrong)
    without = [rank for rank, origin in evidence.trace.origins.items() if not origin.nonces]
    if not evidence.payload.nonce:
        return Verdict(rule=RULE, ok=None, detail="the attempt has no nonce")
    if without:
        detail = (
            f"no nonce of the attempt (annotation '{NONCE_MARK}<CCL_NONCE>') in the traces of"
            f" {count_of(len(without), 'rank')}: another run may have written them; version 0.4 will require it"
        )
        return Verdict(rule=RULE, ok=None, detail=detail)
    return Verdict(rule=RULE, ok=True, detail="every rank's trace has the attempt's nonce")


def _find_foreign_nonce(evidence: Evidence) -> str:
    assert evidence.trace is not None
    for rank, origin in evidence.trace.origins.items():
        if origin.nonces and evidence.payload.nonce and set(origin.nonces) != {evidence.payload.nonce}:
            return f"the trace of rank {rank} has the nonce of another attempt: it was not written by this one"
    return ""


def _find_copy(evidence: Evidence) -> str:
    """Two runs never have the same durations: the same digest means that a trace was copied."""
    assert evidence.trace is not None
    seen: dict[str, str] = {}
    for other in evidence.others:
        if other.is_earlier:
            seen |= dict.fromkeys(other.trace_digests, f"a trace of trial {other.number}")
    for rank, origin in evidence.trace.origins.items():
        if origin.digest and origin.digest in seen:
            return f"the trace of rank {rank} is a copy: its events have the same durations as {seen[origin.digest]}"
        seen[origin.digest] = f"the trace of rank {rank}"
    return ""


def _find_wrong_time(evidence: Evidence) -> str:
    """The absolute times of a trace must lie inside the attempt. The clocks of two nodes may differ."""
    assert evidence.trace is not None
    attempt = evidence.attempt
    if attempt is None or not attempt.is_clock_steady:
        return ""
    for rank, origin in evidence.trace.origins.items():
        if origin.start_s is None or origin.end_s is None:
            continue
        early, late = attempt.started_s - origin.start_s, origin.end_s - attempt.ended_s
        if max(early, late) > DEFAULT.max_clock_difference_s:
            when = f"{early:.0f} s before the attempt started" if early > late else f"{late:.0f} s after it ended"
            return f"the trace of rank {rank} was written {when}"
    return ""
