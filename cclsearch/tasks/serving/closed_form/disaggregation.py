"""Workers that only prefill and workers that only decode, as Splitwise (Patel et al. 2024) and DistServe (Zhong et al.
2024) have it: their columns in a space, equal rows among them, and the load of each in the steady state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.card.model import Card
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import Rows
from cclsearch.stats.columns import map_columns, read_choices
from cclsearch.tasks.machine import read_machine
from cclsearch.tasks.serving.closed_form.replica import Array, Replica, find_served, read_replica
from cclsearch.tasks.serving.closed_form.steady_state import serve, time_parts
from cclsearch.tasks.serving.closed_form.steps import MULTIPLIERS, LoadParts, cached_numbers, compute_load

PREFILL, DECODE = "prefill", "decode"
# After 8 rounds costs change by less than 0.01 %.
ROUNDS = 8
"""Number of updates of the number of sequences that decode."""


@dataclass(frozen=True, eq=False)
class Deployment:
    """The columns of a space: servers that do both, or workers of two kinds."""

    whole: Replica
    prefill: Replica | None = None
    decode: Replica | None = None
    is_apart: NDArray[np.bool_] | None = None
    """(N,) whether a configuration has workers of two kinds."""

    @property
    def accelerators(self) -> Array:
        """(N,)"""
        return self.whole.accelerators


def read_deployment(card: Card, space: Space) -> Deployment:
    """Return the columns of a space. A configuration with `prefill_workers=0` has servers that do both."""
    whole = read_replica(card, space)
    knob = space.find(f"{PREFILL}_workers")
    if knob is None:
        return Deployment(whole)
    ends = {"tp": "gpus_per_worker", "dp": "workers", "ep": "ep", "dp_attention": "dp_attention"}
    layouts = ({name: f"{role}_{end}" for name, end in ends.items()} for role in (PREFILL, DECODE))
    prefill, decode = (read_replica(card, space, layout) for layout in layouts)
    is_apart = read_choices(space, knob, float) > 0
    count = prefill.tp * prefill.dp + decode.tp * decode.dp
    total = np.where(is_apart, count, whole.accelerators)
    prefill, decode = (replace(role, pp=np.ones(len(space)), accelerators=total) for role in (prefill, decode))
    return Deployment(replace(whole, accelerators=total), prefill, decode, is_apart)


def compute_parts(
    card: Card, at: Deployment, concurrency: Array | float, input_len: float, output_len: float
) -> LoadParts:
    """Return the parts of a closed loop of so many clients, or of a batch of so many requests."""
    together = compute_load(card, at.whole, concurrency, input_len, output_len)
    is_apart = at.is_apart
    if at.prefill is None or at.decode is None or is_apart is None:
        return together
    apart = _compute_apart(card, at.prefill, at.decode, concurrency, input_len, output_len)
    return map_columns(lambda own, other: np.where(is_apart, own, other), apart, together)


def _compute_apart(
    card: Card, prefill: Replica, decode: Replica, concurrency: Array | float, input_len: float, output_len: float
) -> LoadParts:
    """Return the parts by Little's law: sequences that decode at once = answers per second x seconds of an answer."""
    lengths = input_len, output_len
    front = compute_load(card, prefill, concurrency, *lengths)
    transfer = _move_prompt(card, prefill, input_len)
    no_change, held = (
        np.zeros(len(MULTIPLIERS)),
        np.broadcast_to(np.asarray(concurrency, dtype=np.float64), prefill.tp.shape),
    )
    for _ in range(ROUNDS):
        back = compute_load(card, decode, held, *lengths)
        parts = replace(
            back,
            prefill=front.prefill,
            prefill_alone=front.prefill_alone,
            prefill_collectives=front.prefill_collectives,
            prefill_engine=front.prefill_engine,
            prefillers=prefill.dp,
            prefill_share=prefill.tp * prefill.dp / prefill.accelerators,
            clients=front.clients,
            transfer=transfer,
        )
        answers_per_s = back.accelerators / serve(parts, no_change).cost / output_len
        held = np.maximum(answers_per_s * output_len * time_parts(parts, no_change).step, 1.0)
    return parts


def _move_prompt(card: Card, prefill: Replica, input_len: float) -> Array:
    """Return the seconds in which the keys and values of a prompt leave their worker, all its ranks at once."""
    model, machine = find_served(card), read_machine(card)
    num_bytes = cached_numbers(model.arch) * model.held_tokens(input_len) * model.arch.num_layers * prefill.cache_bytes
    return np.asarray(machine.out_latency_s + num_bytes / prefill.attention_ranks / machine.out_bytes_s)


UNUSED = ("block_size", "is_chunked", "is_alone", "restarts", "cache_gib", "memory_share", "limits_all")
"""Columns that the closed forms of a load do not use; the simulation does."""
# A small space's rows cost less than finding the equal ones for each calibration.
MIN_ROWS = 4096
"""Size below which a space is computed whole."""


def find_first_equal(at: Deployment) -> Rows:
    """(N,) the first row that equals each row in everything that closed forms use."""
    size = len(at.accelerators)
    if size < MIN_ROWS:
        return np.arange(size)
    roles = [role for role in (at.whole, at.prefill, at.decode) if role is not None]
    columns = [getattr(role, n) for role in roles for n in role.__dataclass_fields__ if n not in UNUSED]
    columns += [] if at.is_apart is None else [at.is_apart]
    values = np.column_stack([column.astype(np.float64) for column in columns])
    _, first, inverse = np.unique(values, axis=0, return_index=True, return_inverse=True)
    return np.asarray(first[inverse.ravel()])
