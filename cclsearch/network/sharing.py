"""Share links between flows: max-min fair rates by water-filling, and the time until all bytes have arrived.

Long TCP and InfiniBand flows approach max-min fairness (Bertsekas and Gallager 1992, section 6.5.2): all rates grow
together until a link is full; its flows keep their rate, and the others grow on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
NEAR = 1 + 1e-9
"""Shares that differ by less are equal."""


def share_flows(flow: Ids, link: Ids, num_flows: int, capacity_L: Array) -> Array:
    """(F,) max-min fair rates of flows over links: flow `flow[i]` uses link `link[i]`; infinite without links.

    In each round, every link that is full before any other link of its flows is filled, so that rounds are few.
    """
    rate = np.full(num_flows, np.inf)
    left = capacity_L.astype(np.float64).copy()
    while len(flow):
        count = np.bincount(link, minlength=len(left))
        share = np.divide(left, count, out=np.full(len(left), np.inf), where=count > 0)
        least = np.full(num_flows, np.inf)
        np.minimum.at(least, flow, share[link])
        least_of_link = np.full(len(left), np.inf)
        np.minimum.at(least_of_link, link, least[flow])
        full = (count > 0) & (share <= least_of_link * NEAR)
        done = np.unique(flow[full[link]])
        rate[done] = least[done]
        is_done = np.zeros(num_flows, dtype=bool)
        is_done[done] = True
        gone = is_done[flow]
        left -= np.bincount(link[gone], weights=rate[flow[gone]], minlength=len(left))
        left = np.maximum(left, 0.0)
        flow, link = flow[~gone], link[~gone]
    return rate


def drain(flow: Ids, link: Ids, bytes_F: Array, capacity_L: Array, after_F: Ids | None = None) -> Array:
    """(F,) seconds after which each flow is complete, with rates shared anew at each end.

    All begin together, but flow f once flow `after_F[f]` is complete, unless that is negative.
    """
    remaining = bytes_F.astype(np.float64).copy()
    finish = np.zeros(len(remaining))
    now = 0.0
    left = remaining > 0
    waits = np.zeros(len(remaining), dtype=bool) if after_F is None else after_F >= 0
    while left.any():
        active = left if after_F is None else left & ~(waits & left[after_F])
        if not active.any():
            raise ValueError("flows wait for each other")
        keep = active[flow]
        rate = share_flows(flow[keep], link[keep], len(remaining), capacity_L)
        wait = np.where(active, remaining / rate, np.inf)
        first = float(wait.min())
        now += first
        ended = active & (wait <= first * NEAR)
        remaining = np.where(active & ~ended, remaining - np.where(active, rate, 0.0) * first, remaining)
        finish[ended] = now
        left = left & ~ended
    return finish


def share_classes(flows_CL: Array, capacity_L: Array) -> Array:
    """(C,) max-min fair rates of a flow of each class; class c has `flows_CL[c, l]` flows on link l, of equal rate."""
    rate = np.full(len(flows_CL), np.inf)
    left = capacity_L.astype(np.float64).copy()
    active = flows_CL.max(axis=1, initial=0.0) > 0
    while active.any():
        count = flows_CL[active].sum(axis=0)
        share = np.divide(left, count, out=np.full(len(left), np.inf), where=count > 0)
        level = float(share.min())
        full = share <= level * NEAR
        ended = active & (flows_CL[:, full].max(axis=1) > 0)
        rate[ended] = level
        left = np.maximum(left - level * flows_CL[ended].sum(axis=0), 0.0)
        active &= ~ended
    return rate
