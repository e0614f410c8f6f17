"""Whether requests that arrive at a rate settle: how long such a load lasts, and whether a server keeps up with it.

A server that is too slow falls behind in one of two ways: the number of requests in it grows, or the time until a
request gets a place does. Both are fitted with a line over the last two thirds of the arrivals; the slope is requests
gained per arriving request, or seconds of delay per second. On a simulated 70B server (max_num_seqs 64 to 1024, 4 to 20
requests/s, 80 s, three seeds each) the two separated the rates below its capacity from those above it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.values import Config

MIN_ARRIVALS_S = 60.0
"""Least seconds of arrivals of a load that is to settle."""
LIFETIMES = 4
"""Least number of request lifetimes that they last."""
SLOWEST_TPOT_S = 0.05
"""Assumed seconds per output token of a request's lifetime if no limit is tighter: slower than people read."""
KEPT_UP = 0.99
"""Share of the arriving requests from which a server keeps up with them."""
_WINDOWS, _SAMPLES = 6, 20
"""Means that the lines are fitted to, and moments of each."""
_SDS = (2.0, 3.0)
"""Standard errors by which a slope must exceed 0: of the delay, and of the number of requests."""


def find_least_s(work: Config) -> float:
    """Return the seconds of arrivals after which a load counts as settled."""
    limits = [float(v) for key, v in work.items() if key.startswith(("at_most.tpot_", "target.tpot"))]
    return max(MIN_ARRIVALS_S, LIFETIMES * float(work.get("output_len", 0)) * min([SLOWEST_TPOT_S, *limits]))


def find_kept_share(arrival_Q: NDArray[np.float64], first_Q: NDArray[np.float64], end_Q: NDArray[np.float64]) -> float:
    """Return the share of the arriving requests that a server keeps up with, 1 if it falls behind by no more than
    chance explains; NaN if there are too few requests.

    `first_Q` and `end_Q` are infinite for requests without a first token or without an end.
    """
    order = np.argsort(arrival_Q, kind="stable")
    arrival, first, end = arrival_Q[order], first_Q[order], np.sort(end_Q)
    span = arrival[-1] - arrival[0] if len(arrival) else 0.0
    edges = arrival[0] + span * np.linspace(1 / 3, 1, _WINDOWS + 1) if span > 0 else np.zeros(1)
    at = np.searchsorted(arrival, edges)
    if len(arrival) < 2 * _WINDOWS or (np.diff(at) < 1).any():
        return np.nan
    moments = edges[0] + (edges[-1] - edges[0]) * (np.arange(_WINDOWS * _SAMPLES) + 1) / (_WINDOWS * _SAMPLES)
    inside = np.searchsorted(arrival, moments, "right") - np.searchsorted(end, moments, "right")
    delays = np.where(np.isfinite(first), first, edges[-1]) - arrival  # without a first token: as long as is known
    means = (
        np.add.reduceat(delays, at[:-1])[:_WINDOWS] / np.diff([*at[:-1], len(arrival)]),
        inside.reshape(_WINDOWS, _SAMPLES).mean(axis=1) * span / len(arrival),
    )
    middle = (edges[1:] + edges[:-1]) / 2
    delay, number = (max(0.0, _fit_slope(middle, each, sds)) for each, sds in zip(means, _SDS, strict=True))
    return min(1 / (1 + delay), max(1 - number, 0.01))


def _fit_slope(at_W: NDArray[np.float64], values_W: NDArray[np.float64], sds: float) -> float:
    """Return the least-squares slope less so many of its standard errors."""
    away = at_W - at_W.mean()
    slope = float(values_W @ away / (away @ away))
    rest = values_W - values_W.mean() - slope * away
    return slope - sds * float(np.sqrt(rest @ rest / (len(at_W) - 2) / (away @ away)))
