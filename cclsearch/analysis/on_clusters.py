"""The predicted primary metric of one configuration on other clusters, simulated, as `sweep-hardware` compares it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.network.spec import ClusterSpec
from cclsearch.network.sweep import Speeds, TimeOn
from cclsearch.plugins import TASKS
from cclsearch.space.table import Space
from cclsearch.stats.closed_form import predict_space, predictor_of


def choose_row(card: Card, space: Space, matches: np.ndarray[tuple[int], np.dtype[np.bool_]], asked: str) -> int:
    """Return the matching row that is predicted to be best and to fit; UserError if there is none."""
    prediction = predict_space(card, space)
    primary = TASKS.get(card.task).primary_metric
    if prediction is None or primary.unit != "s":
        raise UserError(f"{card.name}: its task {card.task!r} predicts no seconds, so there is nothing to simulate")
    rows = np.flatnonzero(matches)
    if not len(rows):
        raise UserError(
            f"no configuration in the search space matches --config {asked!r}: see `ccl-search space explain`"
        )
    return int(prediction.order(rows)[0])


def predict_on_clusters(card: Card, space: Space, row: int) -> TimeOn:
    """Return the function of cluster and speeds to the predicted seconds of this configuration."""
    one = replace(space, codes_NK=space.codes_NK[row : row + 1])
    primary, chip = TASKS.get(card.task).primary, card.hardware.chip

    def time_on(cluster: ClusterSpec, speeds: Speeds) -> float:
        hardware = card.hardware.model_copy(
            update={
                "cluster": cluster.describe(),
                "scale_up_domain": cluster.domain,
                "peak_flops": Config({name: rate * speeds.flops for name, rate in chip.peak_flops.items()}),
                "memory_gb_per_s": chip.memory_gb_per_s * speeds.memory,
            }
        )
        form = predictor_of(card.model_copy(update={"hardware": hardware}), one).forms[primary]
        return float(np.exp(form.metric.sign * form.log_cost(np.array([0]))(form.prior.mean_P))[0])

    return time_on
