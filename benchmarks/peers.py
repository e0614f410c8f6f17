"""BoTorch and SMAC as strategies of the bench; neither is a dependency of this project.

    pip install botorch smac          # with torch from the constraints file, in a separate environment
    python benchmarks/peers.py benchmarks/landscapes --seeds 3 --samplers default botorch smac

Each is the library's own model and acquisition over the search space, as Optuna's samplers are in `ccl-search bench`:
five random trials first, losses on a log scale, failures as twice the worst loss. The arguments are those of `bench`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from cclsearch.cli import bench, read_command
from cclsearch.cli.arguments import add_arguments
from cclsearch.core.errors import UserError
from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import Proposal, Proposer, ProposerContext, ProposerRole, SearchView
from cclsearch.propose.baselines.simple import open_rows
from cclsearch.propose.study.proposer import PENALTY

NUM_RANDOM = 5


@dataclass(frozen=True)
class ModelProposer(Proposer):
    """Proposes random configurations first, then the one with the best acquisition value of the library."""

    name: str

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return one untried configuration."""
        rng = np.random.default_rng([view.seed, len(view.observations)])
        free = open_rows(view)
        if not len(free):
            return ()
        rows, losses = collect_losses(view)
        if len(rows) < NUM_RANDOM or np.ptp(losses) == 0:
            chosen = rng.choice(free)
        else:
            score = {"botorch": ask_botorch, "smac": ask_smac}[self.name]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                chosen = free[int(np.argmax(score(view, rows, losses, free, int(rng.integers(2**31)))))]
        return [Proposal(view.space.config(int(chosen)), self.name, f"best acquisition value of {self.name}")]


def collect_losses(view: SearchView) -> tuple[Any, Any]:
    """Return the tried rows and their log losses; a failed one has twice the worst loss."""
    worst = max((o.loss for o in view.observations if o.loss is not None), default=1.0)
    rows = [o.row for o in view.observations]
    return np.array(rows), np.log([PENALTY * worst if o.loss is None else o.loss for o in view.observations])


def ask_botorch(view: SearchView, rows: Any, losses: Any, free: Any, seed: int) -> Any:
    """Return the log expected improvement under BoTorch's default Gaussian process; categories one-hot."""
    import torch
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from botorch.models.transforms import Standardize
    from gpytorch.mlls import ExactMarginalLogLikelihood

    torch.manual_seed(seed)
    columns = []
    for k, knob in enumerate(view.space.knobs):
        codes = view.space.codes_NK[:, k]
        if knob.is_numeric:
            columns.append(codes / max(len(knob.choices) - 1, 1))
        else:
            columns += [codes == choice for choice in range(len(knob.choices))]
    every = torch.tensor(np.column_stack(columns).astype(float))
    values = torch.tensor(-losses)[:, None]
    model = SingleTaskGP(every[rows], values, outcome_transform=Standardize(1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    with torch.no_grad():
        return LogExpectedImprovement(model, best_f=values.max())(every[free][:, None, :]).numpy()


def ask_smac(view: SearchView, rows: Any, losses: Any, free: Any, seed: int) -> Any:
    """Return the expected improvement under SMAC's random forest."""
    from ConfigSpace import Categorical, ConfigurationSpace, OrdinalHyperparameter
    from scipy.stats import norm
    from smac.model.random_forest.random_forest import RandomForest

    space = ConfigurationSpace(seed=seed)
    codes = [list(range(len(knob.choices))) for knob in view.space.knobs]
    for knob, choices in zip(view.space.knobs, codes, strict=True):
        if knob.is_numeric:
            space.add(OrdinalHyperparameter(knob.name, choices))
        else:
            space.add(Categorical(knob.name, choices))
    names = [knob.name for knob in view.space.knobs]
    every = view.space.codes_NK[:, [names.index(name) for name in space]].astype(float)
    forest = RandomForest(configspace=space, seed=seed)
    forest.train(every[rows], losses)
    mean, variance = (part[:, 0] for part in forest.predict_marginalized(every[free]))
    sd = np.sqrt(np.maximum(variance, 1e-12))
    z = (losses.min() - mean) / sd
    return sd * (z * norm.cdf(z) + norm.pdf(z))


@dataclass(frozen=True)
class PeerFactory:
    """Makes the proposer of a library."""

    library: str
    role = ProposerRole.SAMPLER

    def from_context(self, context: ProposerContext) -> ModelProposer:
        """Return a proposer without any state."""
        return ModelProposer(self.library)


LIBRARIES = ("botorch", "smac")
for _library in LIBRARIES:
    PROPOSERS.register(_library)(PeerFactory(_library))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, read_command("bench")["arguments"])
    args = parser.parse_args()
    missing = [name for name in LIBRARIES if name in (args.samplers or ()) and find_spec(name) is None]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}. Install with: pip install {' '.join(missing)}")
    try:
        return bench.run(args)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
