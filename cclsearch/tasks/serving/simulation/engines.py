"""Many engines, their requests, and the simulated times of each request (`batching.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.tasks.serving.closed_form.replica import Array
from cclsearch.tasks.serving.simulation.step_times import StepTimes

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
ENDLESS = 2.0**50
"""Blocks of a cache that cannot run out."""


@dataclass(frozen=True, eq=False)
class Engines:
    """R engines: the limits of a step; (R,) each."""

    times: StepTimes
    places: Ints
    """Sequences at once."""
    blocks: Array
    """Blocks of the KV cache; `ENDLESS` if each place has its own."""
    is_tight: Bools
    """Whether requests can run out of blocks."""
    lag_s: Array
    """Seconds from a request to the engine's queue."""
    clients: Ints
    """Clients of a closed loop; 0 if requests have arrival times."""


@dataclass(frozen=True, eq=False)
class Requests:
    """Up to Q requests of each of R engines, in the order of their arrival; (R, Q) each."""

    arrival_s: Array
    """Arrival of each request; in a closed loop, 0 for the first of each client, and the others arrive with an answer.
    """
    given: Ints
    asked: Ints
    count: Ints
    """(R,) requests of each engine."""


@dataclass(frozen=True, eq=False)
class Answered:
    """Simulated results; (R, Q) seconds of each request, (R,) sums of each engine."""

    arrival_s: Array
    start_s: Array
    """Start of the first step with a part of it."""
    first_s: Array
    end_s: Array
    steps: Array
    tokens: Array
    """Tokens that the steps computed."""
    preemptions: Ints
    peak: Array
    """Largest share of the KV cache in use; of a cache that cannot run out, with half of each last block."""
    gaps: tuple[tuple[Ints, Array, Array], ...]
    """Engines, seconds between the tokens of an answer, and how many such gaps."""
    tokens_made: Ints
    """Tokens of the answers."""
