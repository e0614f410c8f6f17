"""Which refused trials are retried because other processes disturbed them."""

from __future__ import annotations

import pytest
from test_admission import CARD, RESULT, judge

from cclsearch.loop.jobs import find_disturbance
from cclsearch.tasks.base import task_of

LOADED = {"hosts": ("me",) * 16, "logical_cores": 16, "foreign_cpu_cores": 9.0}


@pytest.mark.parametrize(
    ("result", "is_disturbed"),
    [
        (LOADED, True),
        (LOADED | {"step_times_s": (1.01, 1.83, 0.67, 1.42, 2.21)}, True),
        (LOADED | {"step_times_s": (0.41, 0.42, 0.405, 0.413, 0.41)}, True),
        (LOADED | {"step_times_s": (9.0, 1.0, 1.01, 0.99, 1.02)}, True),
        (LOADED | {"global_batch_size": 16}, False),
        ({"step_times_s": (1.01, 1.83, 0.67, 1.42, 2.21)}, False),
        ({}, False),
    ],
    ids=["load", "load and spread", "load and traced time", "load and first step", "other work", "spread", "quiet"],
)
def test_a_trial_is_retried_if_load_explains_every_violated_rule(result, is_disturbed):
    changed = RESULT.model_copy(update=result)
    outcome = judge(changed)
    found = find_disturbance(outcome, task_of(CARD).load_effects)
    assert (found is not None) == is_disturbed
    assert found is None or found.startswith("other processes use 9.00 of 16 cores")
