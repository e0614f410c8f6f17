"""The rule for TPU slices: each parallel degree uses whole axes of the ICI torus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cclsearch.card.model import Card
from cclsearch.space.rule import BoolArray, Clause, Columns, register_rule


def fit_degrees(torus: tuple[int, ...]) -> set[tuple[int, int, int]]:
    """Every (tp, dp, pp) obtained by assigning each axis of the torus to one of the three.

    These are the meshes that JAX's `mesh_utils.create_device_mesh` can build without `allow_split_physical_axes`.
    """
    fits = {(1, 1, 1)}
    for axis in torus:
        fits = {fit for tp, dp, pp in fits for fit in ((tp * axis, dp, pp), (tp, dp * axis, pp), (tp, dp, pp * axis))}
    return fits


@register_rule("degrees_on_torus", "tp", "dp", "pp")
def _degrees_on_torus(card: Card, options: Mapping[str, Any]) -> Clause | None:
    torus = card.hardware.torus
    if torus is None:
        return None
    allowed = np.array(sorted(fit_degrees(torus)), dtype=np.int64)
    shape = "x".join(map(str, torus))

    def check(at: Columns) -> BoolArray:
        degrees_N3 = np.stack([at["tp"], at["dp"], at["pp"]], axis=1)
        return np.asarray((degrees_N3[:, None, :] == allowed[None, :, :]).all(axis=2).any(axis=1), dtype=bool)

    return (
        f"tp, dp and pp each use whole axes of the {shape} torus",
        check,
        lambda c: f"tp {c['tp']}, dp {c['dp']}, pp {c['pp']} on a torus of {shape}",
    )
