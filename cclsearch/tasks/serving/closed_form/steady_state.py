"""The steady state of a closed loop of clients, from the parts of a load (`steps.py`).

Continuous batching in servers that do both, or the slower of the workers that only prefill and those that only decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cclsearch.tasks.serving.closed_form.replica import Array
from cclsearch.tasks.serving.closed_form.steps import HANDOVER_S, MULTIPLIERS, REQUEST_S, SHARES, TOGETHER, LoadParts


@dataclass(frozen=True, eq=False)
class Served:
    """Metrics of one load, by the multipliers; (..., N) each."""

    cost: Array
    """Accelerator-seconds per output token."""
    tpot_s: Array
    ttft_s: Array
    parts: dict[str, Array]
    """Part -> its share of the cost."""


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds after multipliers; (..., N) each."""

    step: Array
    prefill: Array
    """Seconds of one prompt when all stages are busy."""
    alone: Array
    """Seconds of one prompt from its first to its last stage."""
    request: Array
    step_parts: dict[str, Array]
    """Part -> its share of a step."""


def time_parts(parts: LoadParts, theta: Array) -> Times:
    """Return the seconds of a step and of a prompt."""
    by_name = dict(zip(MULTIPLIERS, np.moveaxis(np.exp(theta), -1, 0)[..., None], strict=True))
    scale = by_name["scale"]
    weights, kv_cache = scale * by_name["weights"] * parts.weights, scale * by_name["kv_cache"] * parts.kv_cache
    decode = np.maximum(weights + kv_cache, scale * by_name["prefill"] * parts.products)
    links, engine = scale * by_name["collectives"], scale * by_name["engine"]
    own = scale * by_name["prefill"]
    return Times(
        step=decode + links * parts.collectives + engine * parts.engine,
        prefill=own * parts.prefill + links * parts.prefill_collectives + engine * parts.prefill_engine,
        alone=own * parts.prefill_alone + links * parts.prefill_collectives + engine * parts.engine,
        request=REQUEST_S * by_name["request"],
        step_parts={
            "weights": np.maximum(decode - kv_cache, 0.0),
            "kv_cache": np.minimum(kv_cache, decode),
            "collectives": links * parts.collectives,
            "engine": engine * parts.engine,
        },
    )


def serve(parts: LoadParts, theta: Array) -> Served:
    """Return the steady state of a closed loop."""
    times = time_parts(parts, theta)
    together = _serve_together(parts, times)
    if not parts.prefillers.any():
        return _lean(together, parts)
    apart, is_apart = _serve_apart(parts, times), parts.prefillers > 0
    together = _lean(together, parts)
    return Served(
        cost=np.where(is_apart, apart.cost, together.cost),
        tpot_s=np.where(is_apart, apart.tpot_s, together.tpot_s),
        ttft_s=np.where(is_apart, apart.ttft_s, together.ttft_s),
        parts={name: np.where(is_apart, apart.parts[name], together.parts[name]) for name in SHARES},
    )


def _lean(served: Served, parts: LoadParts) -> Served:
    """The state with latencies that another prediction moved; the cost follows by Little's law."""
    if not parts.tpot_lean.any() and not parts.ttft_lean.any():
        return served
    ttft, tpot = served.ttft_s * np.exp(parts.ttft_lean), served.tpot_s * np.exp(parts.tpot_lean)
    others = parts.answer - 1
    grown = (ttft + others * tpot) / (served.ttft_s + others * served.tpot_s)
    return Served(
        cost=served.cost * grown,
        tpot_s=tpot,
        ttft_s=ttft,
        parts={name: seconds * grown for name, seconds in served.parts.items()},
    )


def _serve_together(parts: LoadParts, times: Times) -> Served:
    """Continuous batching: while a replica answers a batch, it prefills one prompt for each of its sequences."""
    prompts = parts.batch * times.prefill
    cycle = parts.answer * times.step + prompts
    queue = 0.5 * (TOGETHER + (1 - TOGETHER) * prompts / cycle) * prompts
    tokens = parts.replicas * parts.batch * parts.answer / parts.accelerators
    shares = {"prefill": prompts, **{name: parts.answer * seconds for name, seconds in times.step_parts.items()}}
    return Served(
        cost=cycle / tokens,
        tpot_s=times.step + (1 - TOGETHER) * np.maximum(parts.batch - 1, 0.0) * times.prefill / parts.answer,
        ttft_s=times.request + times.alone + times.step / 2 + queue + parts.waiting / parts.batch * cycle,
        parts={name: seconds / tokens for name, seconds in shares.items()},
    )


def _serve_apart(parts: LoadParts, times: Times) -> Served:
    """Workers that only prefill beside workers that only decode: the slower of the two sets the rate.

    Requests wait where the rate is set, so that the time to the first token follows from Little's law there.
    """
    workers, decode = np.maximum(parts.prefillers, 1.0), parts.answer * times.step
    prompts = parts.clients / workers * times.prefill  # one prompt of each client
    arrive = times.request + times.alone + parts.transfer + HANDOVER_S + times.step / 2
    busy = np.minimum(prompts / (arrive + decode), 1.0)
    ttft = arrive + 0.5 * (TOGETHER + (1 - TOGETHER) * busy) * prompts
    places = np.where(parts.waiting > 0, parts.replicas * parts.batch / decode, np.inf)
    rate = np.minimum(np.minimum(workers / times.prefill, places), parts.clients / (ttft + decode))
    cost = parts.accelerators / (rate * parts.answer)
    of_decode = cost * (1 - parts.prefill_share) / times.step
    return Served(
        cost=cost,
        tpot_s=times.step,
        ttft_s=np.maximum(ttft, parts.clients / rate - decode),
        parts={
            "prefill": cost * parts.prefill_share,
            **{name: of_decode * seconds for name, seconds in times.step_parts.items()},
        },
    )
