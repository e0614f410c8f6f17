"""Shares of the figure's variation that the knobs explain, by Optuna's PED-ANOVA."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from cclsearch.core.values import Value
from cclsearch.record.event import Purpose
from cclsearch.report.rows import TrialRow

# With fewer ranked trials an importance says nothing.
MIN_TRIALS = 6
"""Number of ranked trials from which importances are shown."""
MIN_SHARE = 0.001


def find_importance(trials: Sequence[TrialRow]) -> dict[str, float]:
    """Knob -> its share, the largest first; empty if too few trials are ranked or no knob varied.

    PED-ANOVA compares the best tenth of the trials with all of them (Watanabe et al., IJCAI 2023); it needs no forest.
    """
    ranked = [t for t in trials if t.loss is not None and t.purpose is not Purpose.CONFIRMATION]
    names = dict.fromkeys(knob for trial in ranked for knob in trial.config)
    values: dict[str, list[Value]] = {
        k: list(dict.fromkeys(t.config[k] for t in ranked if k in t.config)) for k in names
    }
    varied = {knob: known for knob, known in values.items() if len(known) > 1}
    kept = [trial for trial in ranked if all(knob in trial.config for knob in varied)]
    if len(kept) < MIN_TRIALS or not varied or len({trial.loss for trial in kept}) < 2:
        return {}
    shares = _ask_optuna(kept, varied)
    return {knob: share for knob, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= MIN_SHARE}


def _ask_optuna(trials: Sequence[TrialRow], varied: dict[str, list[Value]]) -> dict[str, float]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    choices: dict[str, Any] = {k: optuna.distributions.CategoricalDistribution(known) for k, known in varied.items()}
    study = optuna.create_study()
    for trial in trials:
        params = {knob: trial.config[knob] for knob in varied}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=choices, value=trial.loss))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares: dict[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {knob: share for knob, share in shares.items() if share == share}
