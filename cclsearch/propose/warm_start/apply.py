"""Apply the knowledge of earlier searches to the predictor of a space."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.propose.warm_start.knowledge import EarlierKnowledge, LearnedPrior, LearnedResidual
from cclsearch.propose.warm_start.transfer import load_jobs, load_next
from cclsearch.space.table import Space
from cclsearch.stats.calibration import KnownResidual, Prior
from cclsearch.stats.closed_form import ClosedForm, Predictor
from cclsearch.stats.kernel import Array, Features, place_configs

DEFAULT_ODDS = math.log(4.0)
"""Log odds that learned priors hold, where the agreement of earlier searches does not set them."""


_APPLIED: WeakKeyDictionary[Predictor, tuple[EarlierKnowledge, Predictor]] = WeakKeyDictionary()


def apply_earlier(predictor: Predictor, space: Space, knowledge: EarlierKnowledge | None) -> Predictor:
    """Return the predictor of a space with the priors that earlier searches leave; the same for the same arguments."""
    if knowledge is None or not (knowledge.priors or knowledge.ways):
        return predictor
    known = _APPLIED.get(predictor)
    if known is None or known[0] is not knowledge:
        known = knowledge, _replace_priors(predictor, space, knowledge)
        _APPLIED[predictor] = known
    return known[1]


def _replace_priors(predictor: Predictor, space: Space, knowledge: EarlierKnowledge) -> Predictor:
    features, jobs_JC = predictor.features, _load_searches(knowledge)
    if len(jobs_JC):
        features = replace(features, jobs_NJ=load_next(len(features), jobs_JC.shape[1]))
    known = {metric: _place_residuals(each, space, features, jobs_JC) for metric, each in knowledge.residuals.items()}

    def learn(form: ClosedForm) -> ClosedForm:
        metric = form.metric.name
        if metric not in knowledge.priors:
            return form
        prior = replace(_replace_prior(form.multipliers, form.prior, knowledge.priors[metric]), known=known.get(metric))
        return replace(form, prior=prior, unlearned=form.prior, odds=knowledge.odds.get(metric, DEFAULT_ODDS))

    forms = {metric: learn(form) for metric, form in predictor.forms.items()}
    if (loads := predictor.loads) is not None:
        changed = {metric: _replace_load_prior(loads.multipliers, prior, knowledge.priors.get(metric, {}))
                   for metric, prior in loads.priors.items()}  # fmt: skip
        loads = replace(loads, priors=changed)
    memory = predictor.memory
    if memory is not None:
        weighed = {frozenset(one.log_multipliers.items()): one.probability for one in knowledge.ways}
        determined = frozenset(knowledge.priors.get(PEAK_MEMORY, ())) - memory.unidentified
        memory = replace(memory, form=learn(memory.form), determined=determined, probabilities=weighed)
    return replace(predictor, features=features, forms=forms, memory=memory, loads=loads)


def _load_searches(knowledge: EarlierKnowledge) -> Array:
    """Return the loadings of each search with residuals (`load_jobs`), by its position."""
    found = [one for each in knowledge.residuals.values() for one in each]
    shares_J, doublings_J = np.zeros((2, 1 + max((one.search for one in found), default=-1)))
    for one in found:
        shares_J[one.search], doublings_J[one.search] = one.share, one.doublings
    return load_jobs(shares_J, doublings_J)


def _place_residuals(
    residuals: Sequence[LearnedResidual], space: Space, features: Features, jobs_JC: Array
) -> KnownResidual | None:
    """Return the residuals whose configurations differ from the space's only in knobs that vary there."""
    fixed = [knob for knob in space.knobs if len(knob.choices) == 1]
    names = {knob.name for knob in space.knobs}
    here = [
        one
        for one in residuals
        if names <= set(one.config) and all(one.config[knob.name] == knob.choices[0] for knob in fixed)
    ]
    if not here:
        return None
    placed = place_configs(space, [one.config for one in here])
    if placed.numbers_ND.shape[1] != features.numbers_ND.shape[1]:
        return None
    jobs_NJ = jobs_JC[[one.search for one in here]]
    value_m, sd_m = (np.array(each) for each in zip(*((one.mean, one.sd) for one in here), strict=True))
    return KnownResidual(replace(placed, jobs_NJ=jobs_NJ), value_m, sd_m**2)


def _replace_load_prior(multipliers: Sequence[str], prior: Prior, found: Mapping[str, LearnedPrior]) -> Prior:
    """The learned means; the widths are never wider than before."""
    learned = _replace_prior(multipliers, prior, found)
    return replace(learned, sd_P=np.minimum(learned.sd_P, prior.sd_P))


def _replace_prior(multipliers: Sequence[str], prior: Prior, found: Mapping[str, LearnedPrior]) -> Prior:
    learned = [found.get(name) for name in multipliers]
    mean = [one.mean if one else old for one, old in zip(learned, prior.mean_P.tolist(), strict=True)]
    sd = [one.sd if one else old for one, old in zip(learned, prior.sd_P.tolist(), strict=True)]
    return replace(prior, mean_P=np.array(mean), sd_P=np.array(sd))
