"""Planning is a row of stages: each is entered once, in order, and hands a frozen value to the next."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import cclsearch
from cclsearch.plan.plan import Plan, plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.run.spec import SearchLimits

ENGINE = Path(cclsearch.__file__).parent
STAGES = ["card.load", "plan.target", "score.objective", "plan.workload", "plan.strategy", "plan.warm_start"]


def trace_stages(request: SearchRequest) -> tuple[Plan, list[str]]:
    """Return the plan, and the modules of the stages in the order in which `plan_search` called them."""
    entered: list[str] = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or caller.f_code is not plan_search.__code__:
            return
        path = Path(frame.f_code.co_filename)
        if ENGINE in path.parents:
            module = ".".join(path.relative_to(ENGINE).with_suffix("").parts)
            if module in STAGES and entered[-1:] != [module] and frame.f_code.co_name != "is_multi":
                entered.append(module)

    sys.setprofile(watch)
    try:
        plan = plan_search(request)
    finally:
        sys.setprofile(None)
    return plan, entered


@pytest.mark.parametrize("launcher", [None, "slurm-generic"])
def test_each_stage_of_planning_is_entered_once_and_in_order(project: Path, launcher: str | None) -> None:
    plan, entered = trace_stages(SearchRequest(workload="wl2", limits=SearchLimits(budget=3), launcher=launcher))
    assert entered == STAGES
    assert plan.spec.space_size == len(plan.space) > 0
    assert plan.spec.strategy == "default"
