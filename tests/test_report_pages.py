"""Predictions in the report of a long search."""

from __future__ import annotations

from cclsearch.analysis.report_pages import MAX_OBSERVATIONS, pick_nearest
from cclsearch.core.values import Config
from cclsearch.propose.observations import Observation


def test_a_long_search_is_predicted_from_the_trials_nearest_its_winner() -> None:
    configs = [Config(tp=tp, pp=pp, bucket=n) for n in range(40) for tp in (1, 2, 4) for pp in (1, 2)]
    seen = [Observation(number, config, number, 1.0) for number, config in enumerate(configs, 1)]
    picked = pick_nearest(seen, configs[77])
    assert len(picked) == MAX_OBSERVATIONS
    assert [o.trial for o in picked] == sorted(o.trial for o in picked)
    steps = {o.trial: sum(value != configs[77][knob] for knob, value in o.config.items()) for o in seen}
    taken = {o.trial for o in picked}
    assert max(steps[n] for n in taken) <= min(steps[n] for n in steps if n not in taken)
    assert pick_nearest(seen[:50], configs[77]) == seen[:50]
