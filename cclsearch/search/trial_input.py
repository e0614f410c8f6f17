"""What the run script of a trial is given."""

from __future__ import annotations

from cclsearch.core.values import Provenance
from cclsearch.launch.contract import TrialInput
from cclsearch.record.trial import Trial
from cclsearch.run.spec import RunSpec
from cclsearch.space.table import count_ranks


def make_input(spec: RunSpec, trial: Trial) -> TrialInput:
    """Return the trial's configuration with the fixed work of the search."""
    config, card = trial.config, spec.card.for_trial(trial.config)
    per_pass = config.as_int("dp") * config.as_int("micro_batch_size")
    return TrialInput(
        run_id=spec.run_id,
        trial=trial.number,
        config=config,
        arch=card.arch,
        global_batch_size=card.number("global_batch_size"),
        seq_len=card.number("seq_len"),
        precision=card.precision,
        gradient_accumulation=max(1, card.number("global_batch_size") // per_pass),
        num_ranks=count_ranks(config),
        ranks_per_node=card.hardware.accelerators_per_node,
        seed=spec.seed,
        profiled_steps=0 if spec.provenance is not Provenance.MEASURED else 2,
    )
