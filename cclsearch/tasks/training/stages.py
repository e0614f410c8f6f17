"""Layers of each pipeline stage: the choices of the knob `stage_layers`, and the split that suits the speeds.

The step of a 1F1B pipeline with unequal stages takes the sum of all stages, for its first micro-batch, and the longest
one for each other (Narayanan et al. 2021, section 2.2, for equal ones). Holmes (Yang et al. 2023, section 3.3) splits
layers by the speeds of its clusters; `split_layers` finds the split of the shortest step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SPLIT_KNOB, EVEN = "stage_layers", "even"
"""The knob, and its neutral choice: the framework's own split."""
_BY_SPEED = re.compile(r"speed(?:([+-]\d{1,3}))?")
_EXPLICIT = re.compile(r"\d{1,4}(?:-\d{1,4})+")
FORMS = "even, speed, speed+1, speed-1, or the layers of each stage such as 5-3"


@dataclass(frozen=True)
class SplitChoice:
    """One choice of `stage_layers`: even if it is neither by speed nor explicit."""

    by_speed: bool = False
    shift: int = 0
    """Layers that the fastest stage has more than the split by speed, and the slowest fewer."""
    explicit: tuple[int, ...] = ()


def read_split(choice: object) -> SplitChoice | None:
    """Return the split that a choice means; None if it has no known form."""
    text = str(choice)
    if text == EVEN:
        return SplitChoice()
    if found := _BY_SPEED.fullmatch(text):
        return SplitChoice(by_speed=True, shift=int(found[1] or 0))
    return SplitChoice(explicit=tuple(map(int, text.split("-")))) if _EXPLICIT.fullmatch(text) else None


def is_legal(choice: SplitChoice, layers: int, stages: int) -> bool:
    """Whether an explicit choice has a number for each stage, all at least 1, that add up to the layers."""
    parts = choice.explicit
    return not parts or (len(parts) == stages and min(parts) >= 1 and sum(parts) == layers)


def split_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage as near to equal as possible."""
    cuts = [round(layers * stage / stages) for stage in range(stages + 1)]
    return tuple(np.diff(cuts).tolist())


def split_layers(
    layer_s: Sequence[float], extra_s: Sequence[float], layers: int, micro_batches: float
) -> tuple[int, ...]:
    """Return the split of the shortest 1F1B step, at least one layer a stage.

    `layer_s` are the seconds of a layer on each stage, `extra_s` the stage's other seconds. For each possible time of
    the longest stage, the stages that are fastest per layer are filled up to it: that is the least sum.
    """
    cost, extra = np.asarray(layer_s, dtype=np.float64), np.asarray(extra_s, dtype=np.float64)
    stages = len(cost)
    longest = np.unique(np.add.outer(np.arange(1, layers - stages + 2), np.zeros(stages)) * cost + extra)
    room = np.floor((longest[:, None] - extra) / cost + 1e-9).astype(np.int64)
    room = np.minimum(room, layers - stages + 1)
    enough = (room >= 1).all(axis=1) & (room.sum(axis=1) >= layers)
    room, spare = room[enough] - 1, layers - stages
    order = np.argsort(cost, kind="stable")
    before = np.cumsum(room[:, order], axis=1) - room[:, order]
    filled = np.empty_like(room)
    filled[:, order] = np.clip(spare - before, 0, room[:, order])
    splits = filled + 1
    times = splits * cost + extra
    step = times.sum(axis=1) + (micro_batches - 1) * times.max(axis=1)
    return tuple(splits[int(np.argmin(np.round(step, 15)))].tolist())


def shift_layers(split: Sequence[int], layer_s: Sequence[float], shift: int) -> tuple[int, ...]:
    """Return the split with `shift` layers more on the fastest stage, taken from the slowest, which keeps one."""
    # Ties: the first of equally fast stages is the fastest, the last the slowest.
    cost = np.asarray(layer_s)
    fast, slow = int(np.argmin(cost)), len(cost) - 1 - int(np.argmax(cost[::-1]))
    moved = list(split)
    if fast == slow:
        return tuple(moved)
    possible = min(shift, moved[slow] - 1) if shift > 0 else max(shift, 1 - moved[fast])
    moved[fast] += possible
    moved[slow] -= possible
    return tuple(moved)


def apply_split(
    choice: SplitChoice, layer_s: Sequence[float], extra_s: Sequence[float], layers: int, micro_batches: float
) -> tuple[int, ...]:
    """Return the layers of each stage for a choice, of an even split if the choice does not fit the stages."""
    stages = len(layer_s)
    if choice.explicit and is_legal(choice, layers, stages):
        return choice.explicit
    if not choice.by_speed or stages == 1:
        return split_evenly(layers, stages)
    return shift_layers(split_layers(layer_s, extra_s, layers, micro_batches), layer_s, choice.shift)
