"""Make the input of a trial's run script."""

from __future__ import annotations

from cclsearch.core.values import Provenance
from cclsearch.launch.contract import TrialInput
from cclsearch.record.trial import Trial
from cclsearch.run.spec import RunSpec
from cclsearch.space.framework import find_framework
from cclsearch.tasks.base import task_of


def make_input(spec: RunSpec, trial: Trial) -> TrialInput:
    """Return the trial's configuration with the fixed work of the search."""
    card, is_measured = spec.card.for_trial(trial.config), spec.provenance is Provenance.MEASURED
    fields = {"run_id": spec.run_id, "trial": trial.number, "seed": spec.seed, "nonce": trial.nonce}
    if trial.opens_window:
        fields["opens_window"] = True
    if trial.stop_above is not None:
        fields["stop_above"] = trial.stop_above
    if (framework := find_framework(spec.framework)) is not None:
        fields["options"] = framework.list_options(card, trial.config)
    return task_of(card).make_input(card, trial.config, is_measured=is_measured, **fields)
