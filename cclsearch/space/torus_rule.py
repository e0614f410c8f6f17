"""The rule for TPU slices: each parallel degree uses whole axes of the ICI torus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cclsearch.card.model import Card
from cclsearch.space.knobs import rank_degrees, stated_knobs
from cclsearch.space.rule import BoolArray, Clause, Columns, register_rule


def fit_degrees(torus: tuple[int, ...], num_degrees: int = 3) -> set[tuple[int, ...]]:
    """Every tuple of degrees obtained by assigning each axis of the torus to one of them.

    These are the meshes that JAX's `mesh_utils.create_device_mesh` can build without `allow_split_physical_axes`.
    """
    fits = {(1,) * num_degrees}
    for axis in torus:
        fits = {(*fit[:n], fit[n] * axis, *fit[n + 1 :]) for fit in fits for n in range(num_degrees)}
    return fits


@register_rule("degrees_on_torus", rank_degrees, needs=())
def _degrees_on_torus(card: Card, options: Mapping[str, Any]) -> Clause | None:
    torus, degrees = card.hardware.torus, rank_degrees()
    if torus is None:
        return None
    allowed = np.array(sorted(fit_degrees(torus, len(degrees))), dtype=np.int64)
    shape = "x".join(map(str, torus))

    def check(at: Columns) -> BoolArray:
        degrees_ND = np.stack([at[degree] for degree in degrees], axis=1)
        return np.asarray((degrees_ND[:, None, :] == allowed[None, :, :]).all(axis=2).any(axis=1), dtype=bool)

    *most, last = stated_knobs(degrees, options.get("knobs", ()))
    return (
        f"{', '.join(most)} and {last} each use whole axes of the {shape} torus",
        check,
        lambda c: f"{c.describe(degrees, ', ')} on a torus of {shape}",
    )
