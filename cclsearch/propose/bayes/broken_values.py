"""Find the values of unknown knobs that always fail and so explain the failures.

A knob without an entry in `knobs.yaml` has no closed form, and its faults concern a whole value (`method=full` does not
fit, a quantized base without a kernel for it crashes) or a pair of values. A value that was part of a success is not
broken. Of the others, sets of broken values are hypotheses: every trial with a broken value fails, every other one as
often as the rest of the model predicts (a noisy OR; Pearl 1988, section 4.3.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaln

from cclsearch.stats.kernel import Array

Cause = tuple[tuple[int, int], ...]
"""(knob, code) of a value, or of each of two values."""
# One of ten, with the weight of ten seen values.
BROKEN = (1.0, 9.0)
"""Beta prior of the share of the values of unknown knobs that always fail."""
BROKEN_PAIR = (1.0, 49.0)
"""The same of two values of different knobs together: one of fifty."""
MAX_CAUSES = 40
"""Values and pairs that may be the cause; those with the most failures, if more could be."""
MAX_BROKEN = 3
"""Causes in one hypothesis."""
MIN_OTHER = 0.02
"""Minimum probability that a trial without a broken value fails."""
# Up to 10,701 hypotheses are weighed, few remain.
MIN_WEIGHT = 1e-5
"""Weight relative to the likeliest below which a hypothesis is dropped."""


@dataclass(frozen=True, eq=False)
class BrokenValues:
    """Posterior over the causes of the failures so far."""

    codes_NU: NDArray[np.int16]
    """Code of each of the U unknown knobs."""
    causes: tuple[Cause, ...]
    """Values and pairs that were part of a failure and of no success."""
    hypotheses_HC: NDArray[np.float32]
    """1 for each cause that the hypothesis holds for broken."""
    weight_H: Array
    fine: frozenset[Cause]
    """Values and pairs that were part of a success."""
    log_intact_H2: Array
    """Log probability, under each hypothesis, that an untried value and an untried pair do not fail."""

    def p_broken(self, rows: NDArray[np.int64]) -> Array:
        """(m,) probability that each row has a broken value."""
        codes_wU, which_m = np.unique(self.codes_NU[rows], axis=0, return_inverse=True)
        hit_Hw = _is_explained(self.hypotheses_HC, _match(codes_wU, self.causes))
        known = self.fine.union(self.causes)
        counts = [_count_sizes(part for part in _parts(codes_U) if part not in known) for codes_U in codes_wU.tolist()]
        new_w2 = np.array(counts).reshape(-1, 2)
        intact_Hw = np.where(hit_Hw, 0.0, np.exp(self.log_intact_H2 @ new_w2.T))
        return (1 - self.weight_H @ intact_Hw)[which_m.ravel()]


def find_broken_values(
    codes_NU: NDArray[np.int16], fine: NDArray[np.int64], failed_n: NDArray[np.int64], other_n: Array
) -> BrokenValues:
    """Return the posterior, given the rows that succeeded and those that failed.

    `other_n` is the probability of each failure without a broken value.
    """
    codes_nU = codes_NU[failed_n]
    succeeded = frozenset(part for codes_U in codes_NU[fine].tolist() for part in _parts(codes_U))
    causes = _list_causes(codes_nU, succeeded)
    hit_nC = _match(codes_nU, causes)
    hypotheses_HC = _list_hypotheses(len(causes))
    is_pair_C = np.array([len(cause) > 1 for cause in causes], dtype=bool)
    score_H, log_intact_H2 = np.zeros(len(hypotheses_HC)), np.zeros((len(hypotheses_HC), 2))
    for size, (a, b) in enumerate((BROKEN, BROKEN_PAIR)):
        broken_H = hypotheses_HC[:, is_pair_C == bool(size)].sum(axis=1)
        tried = _count_sizes(succeeded)[size] + int((is_pair_C == bool(size)).sum())
        score_H += betaln(a + broken_H, b + tried - broken_H)
        log_intact_H2[:, size] = np.log((b + tried - broken_H) / (a + b + tried))
    log_other_n = np.log(np.clip(other_n, MIN_OTHER, 1.0))
    score_H = score_H + ~_is_explained(hypotheses_HC, hit_nC) @ log_other_n
    weight_H = np.exp(score_H - score_H.max())
    kept = weight_H >= MIN_WEIGHT
    weight_H = weight_H[kept] / weight_H[kept].sum()
    return BrokenValues(codes_NU, causes, hypotheses_HC[kept], weight_H, succeeded, log_intact_H2[kept])


def _parts(codes_U: Sequence[int]) -> Iterator[Cause]:
    """Yield the values of a row, then its pairs of values."""
    values = list(enumerate(codes_U))
    yield from ((value,) for value in values)
    yield from combinations(values, 2)


def _count_sizes(causes: Iterable[Cause]) -> tuple[int, int]:
    """Return the number of values and of pairs."""
    sizes = [len(cause) for cause in causes]
    return sizes.count(1), sizes.count(2)


def _is_explained(hypotheses_HC: NDArray[np.float32], hit_mC: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(H, m) whether each row has a cause that the hypothesis holds for broken."""
    return np.asarray(hypotheses_HC @ hit_mC.T.astype(np.float32) > 0)


@lru_cache(maxsize=MAX_CAUSES + 1)
def _list_hypotheses(num_causes: int) -> NDArray[np.float32]:
    """(H, C) every set of at most `MAX_BROKEN` causes; read-only."""
    sizes = range(min(MAX_BROKEN, num_causes) + 1)
    sets = [chosen for size in sizes for chosen in combinations(range(num_causes), size)]
    hypotheses_HC = np.zeros((len(sets), num_causes), dtype=np.float32)
    for h, chosen in enumerate(sets):
        hypotheses_HC[h, list(chosen)] = 1
    hypotheses_HC.setflags(write=False)
    return hypotheses_HC


def _list_causes(failed_nU: NDArray[np.int16], succeeded: Set[Cause]) -> tuple[Cause, ...]:
    """Return the values and pairs of values that failed and never succeeded, those with the most failures first."""
    counts = Counter(part for codes_U in failed_nU.tolist() for part in _parts(codes_U) if part not in succeeded)
    return tuple(sorted(counts, key=lambda cause: (-counts[cause], len(cause), cause))[:MAX_CAUSES])


def _match(codes_mU: NDArray[np.int16], causes: tuple[Cause, ...]) -> NDArray[np.bool_]:
    """(m, C) whether each row has each cause."""
    hit_mC = np.ones((len(codes_mU), len(causes)), dtype=bool)
    for c, cause in enumerate(causes):
        for u, code in cause:
            hit_mC[:, c] &= codes_mU[:, u] == code
    return hit_mC
