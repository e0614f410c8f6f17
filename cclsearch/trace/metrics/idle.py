"""Causes of device idle time."""

from __future__ import annotations

from pydantic import JsonValue

from cclsearch.trace.diagnosis.gaps import CAUSES, DIAGNOSED, split_idle_ns
from cclsearch.trace.metric import Draft, metric
from cclsearch.trace.result import mean_over_ranks
from cclsearch.trace.view import TraceView


@metric("idle_cause", unit="fraction", over="trace")
def measure_idle_cause(trace: TraceView) -> Draft:
    """Share of device idle time that the host causes (all causes in --json). The host is late with launches or with
    input; `inputs` has the shares of all causes, and of the diagnosis' three: host (also after a synchronization),
    launch and unknown."""
    totals = dict.fromkeys(CAUSES, 0)
    shares: dict[int, float | None] = {}
    for rank, view in trace.ranks.items():
        causes = split_idle_ns(view)
        idle = sum(causes.values())
        shares[rank] = (causes["host_bound"] + causes["input"]) / idle if idle else None
        for cause, ns in causes.items():
            totals[cause] += ns
    idle = sum(totals.values())
    if not idle:
        return Draft(0.0, shares, detail="the device is never idle")
    inputs: dict[str, JsonValue] = {
        "shares": {cause: ns / idle for cause, ns in totals.items()},
        "diagnosed": {group: sum(totals[cause] for cause in causes) / idle for group, causes in DIAGNOSED.items()},
        "idle_s": idle / 1e9,
        "main": max(totals, key=lambda cause: totals[cause]),
    }
    return mean_over_ranks(shares, inputs)
