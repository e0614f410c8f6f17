"""Many engines: their requests, and the calibrated seconds of one step of each, for any mix of prompts and answers.

Weights are read once for both: the linear layers of prompts fill the arithmetic that is idle while answers read them
(Agrawal et al. 2024, Sarathi-Serve, section 4). Attention is computed for each apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cclsearch.tasks.serving.closed_form.replica import Array
from cclsearch.tasks.serving.closed_form.steps import MULTIPLIERS, StepCosts, pad


@dataclass(frozen=True, eq=False)
class StepMix:
    """Tokens of a step of each engine; (R,) each."""

    prompt_tokens: Array
    """Tokens of prompts."""
    pairs: Array
    """Pairs of one of these and a token that it sees."""
    prompts: Array
    """Prompts that they are of."""
    sequences: Array
    """Answers that go on."""
    context: Array
    """Tokens that these hold together."""


@dataclass(frozen=True, eq=False)
class StepTimes:
    """R engines of one pipeline stage group each; `costs` has their rows, `theta_P` log multipliers."""

    costs: StepCosts
    by_name: dict[str, float]

    @classmethod
    def calibrated(cls, costs: StepCosts, theta_P: Array) -> StepTimes:
        """Return the times by these log multipliers."""
        return cls(costs, dict(zip(MULTIPLIERS, np.exp(theta_P).tolist(), strict=True)))

    def seconds(self, mix: StepMix) -> Array:
        """(R,) seconds of a step."""
        costs, at, by_name = self.costs, self.costs.at, self.by_name
        group = pad(mix.sequences, at.batch_bucket)
        own = group * at.attention_ranks / at.tp
        tokens, decoded = mix.prompt_tokens + group * at.checked, group * at.checked
        routed = tokens * np.where(at.ep > at.tp, at.dp, 1.0)
        held = pad(costs.model.held_tokens(mix.context / np.maximum(mix.sequences, 1.0)), at.context_bucket)
        # as far as one layer sees: windows shorten what each token of a prompt sees
        seen = mix.pairs / np.maximum(mix.prompt_tokens, 1.0)
        scores = costs.score_prompt(mix.prompt_tokens * costs.model.held_tokens(seen))
        # few prompts leave ranks that attend to sequences of their own idle
        spread = np.maximum(at.tp / at.attention_ranks / np.maximum(mix.prompts, 1.0), 1.0)
        alone = costs.attend_alone(mix.prompt_tokens, scores)
        most = np.maximum(at.tp / at.attention_ranks - 1.0, 1e-9)
        attend = costs.waits * (scores + alone * (spread - 1.0) / most)
        prompt = costs.waits * costs.multiply(mix.prompt_tokens)
        weights = by_name["weights"] * (costs.dense_s + costs.read_experts(routed))
        keys = by_name["kv_cache"] * own * held * costs.key_s
        multiplied = by_name["prefill"] * costs.multiply(decoded)
        decode = np.maximum(weights + keys, multiplied + by_name["prefill"] * own * at.checked * held * costs.score_s)
        idle = np.maximum(weights - multiplied, 0.0)
        prefill = np.maximum(by_name["prefill"] * prompt - idle, 0.0) + by_name["prefill"] * attend
        linked = costs.communicate(decoded + costs.waits * mix.prompt_tokens)
        step = decode + prefill + by_name["collectives"] * linked
        launched = costs.launch((mix.prompt_tokens > 0).astype(np.float64))
        step = step + by_name["engine"] * (costs.plan(group, own) + launched)
        return np.asarray(by_name["scale"] * at.engine_time * step)


def count_steps(first: Array, slope: Array, until: Array) -> Array:
    """Return how many steps end at or after that time, if each takes `slope` longer than the one before."""
    middle = first - slope / 2
    root = np.sqrt(np.maximum(middle**2 + 2 * slope * np.where(np.isfinite(until), until, 0.0), 0.0))
    grown = np.where(slope > 1e-15, (root - middle) / np.where(slope > 1e-15, slope, 1.0), until / first)
    return np.where(np.isfinite(until), np.ceil(grown - 1e-9), np.inf)


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
    """Arrival of each request; in a closed loop 0 for the first of each client, others arrive with an answer."""
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
