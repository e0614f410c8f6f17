"""The LLM agent of a task outside the tree: its words, its metric and its better direction, and constraints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cclsearch.card.model import Card, Hardware
from cclsearch.core.metrics import PEAK_MEMORY, Direction, MetricInfo
from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.loop.llm_agent import describe_goal
from cclsearch.plugins import TASKS
from cclsearch.propose.agent.arbiter.seeds import propose_seed
from cclsearch.propose.agent.decision import ToolReply
from cclsearch.propose.agent.memory.evidence import NoEvidence, TrialEvidence
from cclsearch.propose.agent.options import read_seed_program
from cclsearch.propose.agent.policy.inputs import policy_inputs
from cclsearch.propose.agent.prompt.prompt import PromptInput, PromptOptions, write_turn_prompt
from cclsearch.propose.agent.prompt.surrogate_table import SurrogateTable, make_surrogate_table
from cclsearch.propose.agent.providers.types import ToolCall
from cclsearch.propose.agent.tools.tool_handlers import ToolHandlers
from cclsearch.propose.agent.tools.tool_schemas import make_toolset
from cclsearch.propose.base import Observation, SearchView
from cclsearch.scoring.objective import Constraint, single_metric
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.tasks.base import Task

RATE = MetricInfo(
    name="images_per_s",
    unit="images/s",
    direction=Direction.MAXIMIZE,
    source="result",
    label="image rate",
    is_positive=True,
)
DELAY = MetricInfo(name="delay_p99_s", unit="s", direction=Direction.MINIMIZE, source="result", is_positive=True)
WORDS_OF_TRAINING = re.compile(
    r"step|train|optimizer|token|sequence|layer|hidden|language|expert|batch|tensor|pipeline"
)
NUM_ROWS = 8


class Resizing(Task):
    name = "resizing"
    metrics = (RATE, DELAY)
    primary = RATE.name
    needs_model = False
    tuned = "how pictures are resized on accelerators"
    unit_of_work = "picture"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    TASKS.register(Resizing.name)(Resizing())
    yield
    del TASKS._entries[Resizing.name]


def make_view() -> SearchView:
    """Eight configurations; more lanes are better, up to 100 images/s."""
    lanes = tuple(range(1, NUM_ROWS + 1))
    space = space_from_rows(
        (Knob("lanes", lanes), Knob("cache", (True,))), [{"lanes": n, "cache": True} for n in lanes]
    )
    hardware = Hardware(accelerator="cpu", num_accelerators=2, accelerators_per_node=2, memory_gib=8.0)
    card = Card(
        name="small", title="pictures", task="resizing", family="", work={"pixels": 640}, precision="",
        hardware=hardware, framework="resizer",
    )  # fmt: skip
    view = SearchView(card, space, (), frozenset(), budget_left=5, seed=0, next_trial=4)
    failed = Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message="no such lane")
    seen = (
        observe(view, 1, 2, 50.0),
        observe(view, 2, 3, 80.0),
        Observation(3, space.config(0), 0, None, failure=failed),
    )
    return replace(view, observations=seen)


def observe(view: SearchView, trial: int, row: int, rate: float, delay_s: float = 1.0) -> Observation:
    metrics = {RATE.name: rate, DELAY.name: delay_s, PEAK_MEMORY: 2.0}
    violation = view.objective.violation(metrics)
    loss = None if violation else view.objective.loss(metrics)
    return Observation(trial, view.space.config(row), row, loss, metrics=metrics, violation=violation, spread=0.02)


def make_table(view: SearchView) -> SurrogateTable:
    """Predicts 20, 30, ... 90 images/s; optimistically a tenth more."""
    rate_N = 20.0 + 10.0 * np.arange(NUM_ROWS)
    memory_N, fits_N, order = np.full(NUM_ROWS, 2.0), np.full(NUM_ROWS, 0.95), (7, 6, 5, 4, 0, 1)
    wins_N = np.where(1.1 * rate_N > 80, 0.3, 0.0)
    return SurrogateTable(rate_N, 1.1 * rate_N, memory_N, fits_N, order, False, "something may be left", wins_N=wins_N)


def make_handlers(view: SearchView) -> ToolHandlers:
    return ToolHandlers(view=view, table=make_table(view), evidence=NoEvidence(), overrules_left=1)


def ask(view: SearchView, name: str, **arguments: Any) -> ToolReply:
    return make_handlers(view).answer(ToolCall(id="1", name=name, arguments=arguments))


def write(view: SearchView, mode: str = "configs", table: SurrogateTable | None = None) -> tuple[str, str, str]:
    """System part, user part and tools of a turn."""
    evidence = {2: TrialEvidence(diagnosis=("decoding takes 70 %",))}
    tools = make_toolset(view, mode)
    prompt_input = PromptInput(view, table or make_table(view), 1, evidence, program=read_seed_program(view, None))
    options = PromptOptions(mode, goal=describe_goal(view.objective, view.primary))
    prompt = write_turn_prompt(prompt_input, tools, options)
    return prompt.system, prompt.user, json.dumps([tool.model_dump() for tool in tools])


def bounded(view: SearchView) -> SearchView:
    """The view with trial 2 above the bound of the delay."""
    bound = Constraint(metric=DELAY.name, at_most=2.0, unit="s")
    view = replace(view, target=single_metric(RATE).model_copy(update={"constraints": (bound,)}))
    return replace(view, observations=(observe(view, 1, 2, 50.0), observe(view, 2, 3, 80.0, delay_s=3.0)))


@pytest.mark.parametrize("mode", ["configs", "policy"])
def test_prompt_has_the_words_of_its_task_and_none_of_training(mode):
    system, user, tools = write(make_view(), mode)
    assert system.startswith("You tune how pictures are resized on accelerators.")
    assert "A surrogate model (fitted to the trials so far) predicts" in system
    assert "`part` is all, memory:all, KNOB=VALUE" in tools
    assert 'framework "resizer"\nfixed work: pixels 640\n2 x cpu' in system
    assert "OBJECTIVE\nloss = 1 / image rate (images/s); lower is better\n" in system
    assert "\nloss = 1 / images_per_s, so a higher images_per_s is better\n" in system
    assert "trial by loss images_per_s vs_best peak_GiB | lanes" in user
    assert "pred_images_per_s optimistic vs_best pred_GiB P(fits) P(wins) free changes | lanes" in user
    assert '"expected_images_per_s"' in tools
    assert "measurements, the measured time of each part of its picture if it was traced" in tools
    found = WORDS_OF_TRAINING.findall("\n".join((system, user, tools)))
    assert found == []


def test_trials_are_described_with_the_metric_and_its_unit():
    text = ask(make_view(), "trial", trial=2).text
    assert "loss 0.0125, image rate 80 images/s" in text
    assert "image rate spread 2.0%" in text


def test_candidates_are_sorted_in_the_better_direction():
    lines = ask(make_view(), "candidates", sort="image rate").text.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["90", "80", "70", "60", "30"]
    assert lines[0].startswith("90 99 x0.889 2 0.95"), "a ratio below 1 is better than the best trial"


def test_surrogate_objects_to_what_has_no_real_chance_to_win():
    view = replace(make_view(), observations=make_view().observations[:2])
    worse = ask(view, "submit", configurations=[{"config": {"lanes": 2}, "rationale": "r"}]).decision
    better = ask(view, "submit", configurations=[{"config": {"lanes": 8}, "expected_images_per_s": 91}]).decision
    assert worse is not None
    assert better is not None
    assert worse.submitted[0].is_overrule
    assert not better.submitted[0].is_overrule
    assert dict(better.submitted[0].expects.metrics) == {"images_per_s": 91.0}


def test_refusal_says_why_and_that_no_credit_is_left():
    view = make_view()
    handlers = replace(make_handlers(view), overrules_left=0)
    arguments = {"configurations": [{"config": {"lanes": 2}, "rationale": "r"}]}
    text = handlers.answer(ToolCall(id="1", name="submit", arguments=arguments)).text
    assert text.startswith("the surrogate's chance that it beats the best is 0.0%, below 2%, and no credit is left")


def test_safe_default_is_the_greatest_rate():
    view = replace(make_view(), observations=make_view().observations[2:])
    seeds = propose_seed(view, None, _AgentOf(make_table(view)))  # type: ignore[arg-type]
    assert seeds[0].config == view.space.config(7)
    assert seeds[0].rationale == "a safe default: the best that is very likely to fit"
    assert seeds[0].expects.metrics["images_per_s"] == 90.0


class _AgentOf:
    """Stands for the agent where only its table is asked for."""

    def __init__(self, table: SurrogateTable) -> None:
        self.options = type("Options", (), {"seed_policy": None})
        self.make_table = lambda view: table


def test_policy_programs_get_the_work_of_the_task():
    workload, environment, history = policy_inputs(make_view())
    assert workload["pixels"] == 640
    assert "num_layers" not in workload
    assert environment["total_gpus"] == 2
    assert [record["status"] for record in history] == ["success", "success", "error"]


def test_a_violated_constraint_is_no_failure():
    view = bounded(make_view())
    system, user, _ = write(view)
    assert "only trials with delay_p99_s at most 2 s count" in system
    assert "trial by loss images_per_s vs_best peak_GiB delay_p99_s | lanes\n1 seed 0.02 50 x1.000 2 1 | 3\n" in user
    assert "2 seed - 80 - 2 3 | 4 (violates by 50.0%: delay_p99_s must be at most 2 s; it is 3)" in user
    assert "FAILURES" not in user
    assert "violates by 50.0%" in ask(view, "trial", trial=2).text
    assert [record["status"] for record in policy_inputs(view)[2]] == ["success", "constraint violated"]


def test_probability_of_the_constraints_is_shown_and_judged():
    view = bounded(make_view())
    table = make_table(view)
    satisfies_N = np.where(np.arange(NUM_ROWS) == 7, 0.02, 0.8)
    wins_N = np.where(np.arange(NUM_ROWS) == 7, 0.0, 0.3)
    table = replace(table, order=(6, 5, 4, 1, 0, 7), satisfies_N=satisfies_N, wins_N=wins_N)
    user = write(view, table=table)[1]
    assert "vs_best pred_GiB P(fits) P(constraints) P(wins) free changes | lanes\n" in user
    assert "\n90 99 x0.556 2 0.95 0.02 0.000 - 1 | 8\n" in user
    handlers = replace(make_handlers(view), table=table, overrules_left=0)

    def submit(lanes: int) -> ToolReply:
        arguments = {"configurations": [{"config": {"lanes": lanes}, "rationale": "r"}]}
        return handlers.answer(ToolCall(id="1", name="submit", arguments=arguments))

    assert submit(8).text.startswith("the surrogate's probability that it satisfies the constraints is 0.02, and")
    assert submit(7).decision is not None


def test_fitted_surrogate_predicts_the_metric_itself_and_its_constraints():
    view = bounded(make_view())
    table = make_surrogate_table(view)
    rows = [0, 1, 4, 5, 6, 7]
    assert np.all(table.optimistic_N[rows] > table.value_N[rows])
    assert 30.0 < table.value_N[4] < 200.0, "in images per second, not its reciprocal"
    assert table.satisfies_N is not None
    assert table.satisfies_N[1] > table.satisfies_N[4]
    assert make_surrogate_table(make_view()).satisfies_N is None


def test_state_says_that_no_trial_satisfies_the_constraints():
    view = bounded(make_view())
    view = replace(view, observations=view.observations[1:])
    assert "best: none, no trial satisfies the constraints yet" in write(view)[1]
    assert "no trial satisfies the constraints yet" in ask(view, "finish", reason="done").text


def test_a_task_without_a_policy_shows_no_program():
    assert read_seed_program(make_view(), None) == ""
    assert "BEST PROGRAM" not in write(make_view(), "policy")[1]
