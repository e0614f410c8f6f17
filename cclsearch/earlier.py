"""What earlier searches on the same model, cluster and framework teach this one (`--learn-from`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cclsearch.errors import UserError
from cclsearch.propose.base import Observation
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger
from cclsearch.record.observe import Observer
from cclsearch.spec import RunSpec, read_spec


def load_prior(spec: RunSpec) -> tuple[Observation, ...]:
    """Observations of the runs that `spec.learn_from` names; raises UserError where one tells of another world.

    Figures of different provenance never mix: a measured search does not learn from recorded or simulated runs.
    """
    prior: list[Observation] = []
    for name in spec.learn_from:
        folder = Path(name)
        earlier = read_spec(folder)
        _check_comparable(spec, earlier, folder)
        state = fold_ledger(folder / LEDGER_FILE)
        prior.extend(replace(observation, row=None) for observation in Observer().observe(state))
    return tuple(prior)


def _check_comparable(spec: RunSpec, earlier: RunSpec, folder: Path) -> None:
    pairs = {
        "model": (spec.card.arch, earlier.card.arch),
        "global batch": (spec.card.global_batch_size, earlier.card.global_batch_size),
        "sequence length": (spec.card.seq_len, earlier.card.seq_len),
        "accelerator": (spec.card.hardware.accelerator, earlier.card.hardware.accelerator),
        "framework": (spec.framework, earlier.framework),
        "provenance": (spec.provenance, earlier.provenance),
    }
    differs = [name for name, (ours, theirs) in pairs.items() if ours != theirs]
    if differs:
        raise UserError(
            f"--learn-from {str(folder)!r} cannot teach this search: its {', '.join(differs)} differ(s);"
            " name runs of the same model, batch, accelerator and framework"
        )
