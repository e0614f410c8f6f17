"""The admission gate: the rules that decide whether a trial is ranked, and the rules that apply to every task.

A rule returns True, False, or None if it does not apply or cannot be checked; one False excludes the trial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from pydantic import Field

from cclsearch.card.hardware import match_accelerator
from cclsearch.core.text import count_of
from cclsearch.core.values import Model, Provenance
from cclsearch.launch.contract import NONCE_MARK
from cclsearch.scoring.evidence import Evidence, EvidenceOf
from cclsearch.scoring.outcome import LOAD_RULE, Admission, Verdict


class Thresholds(Model):
    """Limits that a run must meet to be ranked."""

    max_foreign_share: float = Field(default=0.15, gt=0)
    """Cores that other processes take from the ranks divided by cores that the ranks use, on accelerators."""
    max_foreign_share_cpu: float = Field(default=0.25, gt=0)
    """The same if the ranks compute on those cores; retries and the spread catch the rest."""
    # Clocks of nodes differ, and users may set them; Slurm's munge allows 300 s.
    max_clock_difference_s: float = Field(default=600.0, ge=0)
    """Seconds by which a trace's times may be outside the attempt. Within it, nonce and content decide."""


DEFAULT = Thresholds()
# Of 39 honest trials on a machine with a load of 6 to 9 on 2 cores, at most 0.3 % and 0.009 s.
MAX_UNSEEN, MAX_UNSEEN_S = 0.02, 0.05
"""Share and seconds by which the search may see a timed window take longer than what the script reports."""

Finding = tuple[bool | None, str]
"""Whether a trial satisfies a rule (None: it does not apply, or cannot be checked), and the verdict's detail."""
AnyEvidence = TypeVar("AnyEvidence", bound=EvidenceOf[Any, Any])


def admission_rule(
    name: str, *, unmeasured: str = ""
) -> Callable[[Callable[[AnyEvidence], Finding]], Callable[[AnyEvidence], Verdict]]:
    """Return a decorator that makes a rule of the gate from a function that returns a `Finding`.

    With `unmeasured` the function only judges trials that ran; it is the detail of the verdict on all others.
    """

    def decorate(check: Callable[[AnyEvidence], Finding]) -> Callable[[AnyEvidence], Verdict]:
        @wraps(check)
        def judge(evidence: AnyEvidence) -> Verdict:
            if unmeasured and not evidence.is_measured:
                ok, detail = None, f"{evidence.provenance.value}: {unmeasured}"
            else:
                ok, detail = check(evidence)
            return Verdict(rule=name, ok=ok, detail=detail)

        return judge

    return decorate


@admission_rule("trace_origin")
def check_trace_origin(evidence: Evidence) -> Finding:
    """Whether the traces are this attempt's: its nonce, times inside it, and no other trial's or rank's content."""
    if not evidence.is_measured or evidence.trace is None or not evidence.trace.origins:
        return None, "the trial has no traces"
    wrong = _find_foreign_nonce(evidence) or _find_copy(evidence) or _find_wrong_time(evidence)
    if wrong:
        return False, wrong
    without = [rank for rank, origin in evidence.trace.origins.items() if not origin.nonces]
    if not evidence.payload.nonce:
        return None, "the attempt has no nonce"
    if without:
        return None, (
            f"no nonce of the attempt (annotation '{NONCE_MARK}<CCL_NONCE>') in the traces of"
            f" {count_of(len(without), 'rank')}: another run may have written them; version 0.4 will require it"
        )
    return True, "every rank's trace has the attempt's nonce"


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


def admit(evidence: Evidence, rules: Sequence[Callable[[Evidence], Verdict]]) -> Admission:
    """The verdict of every rule on one finished trial; it is admitted unless a rule is violated."""
    verdicts = tuple(rule(evidence) for rule in rules)
    return Admission(admitted=all(verdict.ok is not False for verdict in verdicts), verdicts=verdicts)


@admission_rule("provenance")
def check_provenance(evidence: Evidence) -> Finding:
    """Whether result and launcher agree on the provenance: measured, recorded or simulated."""
    result = evidence.result
    claimed, meaning = Provenance.MEASURED, "measured: the job ran"
    if result.caller:
        claimed, meaning = Provenance.CALLER, "caller-measured: a function measured it, no job ran"
    elif result.simulated:
        claimed, meaning = Provenance.SIMULATED, "simulated: computed by a model, no job ran"
    elif result.recorded:
        claimed, meaning = Provenance.RECORDED, "recorded: looked up, no job ran"
    if claimed is not evidence.provenance:
        meaning = f"the result says {claimed.value}, the launcher {evidence.provenance.value}"
    return claimed is evidence.provenance, meaning


@admission_rule("world_size")
def check_world_size(evidence: Evidence) -> Finding:
    """Whether the requested number of ranks ran."""
    want, got = evidence.payload.num_ranks, evidence.result.world_size
    if got is None:
        return False if evidence.is_measured else None, "the run script did not declare its world size"
    if got != want:
        return False, f"{count_of(got, 'rank')} ran, but {want} were requested"
    return True, count_of(got, "rank")


@admission_rule("ranks_traced", unmeasured="there are no traces")
def check_ranks_traced(evidence: Evidence) -> Finding:
    """Whether the trace of every rank was found and read."""
    if not evidence.payload.wants_traces:
        return None, "no traces were requested"
    ranks = set(evidence.trace.ranks) if evidence.trace else set()
    missing = sorted(set(range(evidence.payload.num_ranks)) - ranks)
    if missing:
        where = "" if ranks else "; the run script writes one of each rank to trace/ (docs/your-framework.md)"
        return False, f"no readable trace of rank {_shorten(missing)}{where}"
    return True, f"traces of {count_of(len(ranks), 'rank')}"


@admission_rule("timed_window", unmeasured="nothing was timed here")
def check_timed_window(evidence: Evidence) -> Finding:
    """Whether the work of each timed window was known only when it opened, and done when it closed."""
    timed = evidence.attempt.timed if evidence.attempt else ()
    if not evidence.payload.opens_window:
        return None, "the run script opens no window that the search sees: its work was known before"
    if any(not window.nonce for window in timed):
        return None, "the search did not run when the window opened, so its work was known before"
    digests = evidence.result.list_digests(evidence.payload)
    if len(timed) != len(digests):
        return False, f"the run script opened {count_of(len(timed), 'timed window')} of {len(digests)}"
    for number, (window, digest) in enumerate(zip(timed, digests, strict=True), start=1):
        if window.seconds is None or window.seconds < 0:
            wrong = "was not closed" if window.seconds is None else "was closed before the search gave its nonce"
            return False, f"timed window {number} {wrong}"
        if window.digest != digest:
            return False, f"the results of timed window {number} are others than those that it closed with"
    seconds = sum(window.seconds or 0.0 for window in timed)
    return True, f"its work was known only when it opened; it took {seconds:.4g} s by the search's clock"


@admission_rule("devices")
def check_devices(evidence: Evidence) -> Finding:
    """Whether the trial ran on the accelerator of the frozen inputs."""
    traced = evidence.trace.devices if evidence.trace else ()
    names = Counter((*evidence.result.devices, *(name for name in traced if match_accelerator(name))))
    if not names:
        return None, "neither the run script nor the traces name the devices"
    hardware = evidence.card.hardware
    wanted = match_accelerator(hardware.accelerator, hardware.memory_gib) or match_accelerator(hardware.accelerator)
    if wanted is None:
        return None, f"the card's accelerator {hardware.accelerator!r} is unknown"
    different, unknown = [], []
    for name in names:
        found = match_accelerator(name) or match_accelerator(name, hardware.memory_gib)
        if found is None:
            unknown.append(name)
        elif found.name != wanted.name:
            different.append(f"{name!r} is {found.name}")
    if different:
        return False, f"the inputs name {wanted.name}, but {'; '.join(different)}"
    if unknown and wanted.kind != "cpu":
        listed = ", ".join(map(repr, unknown))
        if all(_is_like(name, wanted.name) for name in unknown):
            return None, f"unknown devices: {listed}"
        return False, f"the inputs name {wanted.name}, but it ran on {listed}"
    return True, ", ".join(names)


@admission_rule(LOAD_RULE)
def check_load(evidence: Evidence) -> Finding:
    """Whether other processes took cores from the ranks; load on cores that the ranks leave idle does not count."""
    result = evidence.result
    if not evidence.is_measured or result.foreign_cpu_cores is None or result.logical_cores is None:
        return None, "the CPU load from other processes was not measured"
    ranks_here = max(Counter(result.hosts).values(), default=evidence.payload.num_ranks)
    used = min(ranks_here, result.logical_cores)
    idle = result.logical_cores - used
    taken = max(0.0, result.foreign_cpu_cores - idle)
    load = f"other processes use {result.foreign_cpu_cores:.2f} of {result.logical_cores} cores"
    detail = f"{load}, and the ranks need {used if idle else f'all {used}'}"
    most = DEFAULT.max_foreign_share_cpu if evidence.is_on_cpu else DEFAULT.max_foreign_share
    if taken / used > most:
        host = f" on {result.hosts[0]}" if result.hosts else ""
        listed = result.extra.get("foreign_processes", "")
        detail += f": {taken:.2f} cores taken from the ranks" if idle else ""
        return False, f"{detail}. Stop them{host}{f' ({listed})' if listed else ''}"
    return True, detail


@admission_rule("unedited")
def check_unedited(evidence: Evidence) -> Finding:
    """Whether the evidence is still what the ledger has hashes of: what changed is not judged again."""
    if not evidence.is_sealed:
        return None, "evaluated when the trial finished"
    return True, "result.json has the hash recorded in the ledger"


def _is_like(name: str, accelerator: str) -> bool:
    """Whether an unknown device name contains the accelerator's name (`h100` in `NVIDIA H100 NVL`)."""
    return accelerator.split("-")[0] in name.lower()


def _shorten(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


GENERAL_RULES: tuple[Callable[[Evidence], Verdict], ...] = (
    check_provenance,
    check_world_size,
    check_ranks_traced,
    check_trace_origin,
    check_timed_window,
    check_devices,
    check_load,
    check_unedited,
)
"""The rules that apply to every task, in display order."""
