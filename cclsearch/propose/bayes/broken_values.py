"""Values of unknown knobs that always fail: which of them explain the failures so far.

A knob without an entry in `knobs.yaml` has no closed form, and what goes wrong with it goes wrong for a whole value
(`method=full` does not fit, a quantized base without a kernel for it crashes) or for a pair of values. A value that was
part of a success is not broken. Of the others, sets of broken values are hypotheses: every trial with a broken value
fails, every other one as often as the rest of the model says (a noisy OR; Pearl 1988, section 4.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from cclsearch.stats.kernel import Array

P_BROKEN = 0.1
"""Prior probability that a value of an unknown knob always fails."""
P_BROKEN_PAIR = 0.02
"""The same of two values of different knobs together."""
MAX_CAUSES = 40
"""Values and pairs that may be the cause; those with the most failures, if more could be."""
MAX_BROKEN = 3
"""Causes in one hypothesis."""
MIN_OTHER = 0.02
"""Minimum probability that a trial without a broken value fails."""
MIN_WEIGHT = 1e-5
"""Hypotheses less likely than this, relative to the likeliest, are dropped: up to 10,701 are weighed, few remain."""


@dataclass(frozen=True, eq=False)
class BrokenValues:
    """Posterior over the causes of the failures so far."""

    codes_NU: NDArray[np.int16]
    """Code of each of the U unknown knobs."""
    causes: tuple[tuple[tuple[int, int], ...], ...]
    """Each cause as its (knob, code) or two of them."""
    hypotheses_HC: NDArray[np.float32]
    """1 for each cause that the hypothesis holds for broken."""
    weight_H: Array

    def p_broken(self, rows: NDArray[np.int64]) -> Array:
        """(m,) probability that each row has a broken value; 0 if none of its values was part of a failure."""
        codes_wU, which_m = np.unique(self.codes_NU[rows], axis=0, return_inverse=True)
        return (_is_explained(self.hypotheses_HC, _match(codes_wU, self.causes)).T @ self.weight_H)[which_m.ravel()]


def find_broken_values(
    codes_NU: NDArray[np.int16], fine: NDArray[np.int64], failed_n: NDArray[np.int64], other_n: Array
) -> BrokenValues:
    """Return the posterior, given the rows that succeeded and those that failed.

    `other_n` is the probability of each failure without a broken value.
    """
    codes_nU = codes_NU[failed_n]
    causes = _list_causes(codes_nU, codes_NU[fine])
    hit_nC = _match(codes_nU, causes)
    hypotheses_HC = _list_hypotheses(len(causes))
    prior_C = np.array([P_BROKEN if len(cause) == 1 else P_BROKEN_PAIR for cause in causes], dtype=np.float64)
    score_H = hypotheses_HC @ np.log(prior_C / (1 - prior_C))
    log_other_n = np.log(np.clip(other_n, MIN_OTHER, 1.0))
    score_H = score_H + ~_is_explained(hypotheses_HC, hit_nC) @ log_other_n
    weight_H = np.exp(score_H - score_H.max())
    kept = weight_H >= MIN_WEIGHT
    return BrokenValues(codes_NU, causes, hypotheses_HC[kept], weight_H[kept] / weight_H[kept].sum())


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


def _list_causes(failed_nU: NDArray[np.int16], fine_nU: NDArray[np.int16]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the values and pairs of values that failed and never succeeded, those with the most failures first."""
    fine: set[tuple[tuple[int, int], ...]] = set()
    for codes_U in fine_nU.tolist():
        values = list(enumerate(codes_U))
        fine |= {*((value,) for value in values), *combinations(values, 2)}
    counts: dict[tuple[tuple[int, int], ...], int] = {}
    for codes_U in failed_nU.tolist():
        values = list(enumerate(codes_U))
        for cause in (*((value,) for value in values), *combinations(values, 2)):
            if cause not in fine:
                counts[cause] = counts.get(cause, 0) + 1
    return tuple(sorted(counts, key=lambda cause: (-counts[cause], len(cause), cause))[:MAX_CAUSES])


def _match(codes_mU: NDArray[np.int16], causes: tuple[tuple[tuple[int, int], ...], ...]) -> NDArray[np.bool_]:
    """(m, C) whether each row has each cause."""
    hit_mC = np.ones((len(codes_mU), len(causes)), dtype=bool)
    for c, cause in enumerate(causes):
        for u, code in cause:
            hit_mC[:, c] &= codes_mU[:, u] == code
    return hit_mC
