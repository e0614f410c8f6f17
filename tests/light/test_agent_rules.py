"""What an LLM may do, on a real surrogate: the rules leave no gap, and what it learns can be withdrawn."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llm.players import own_turn
from llm.turns import Scripted, call, submit
from paths import ROOT

from cclsearch.core.values import Failure, FailureKind, Stage
from cclsearch.propose.agent.agent import Agent, TurnOutcome
from cclsearch.propose.agent.arbiter.proposer import Arbiter
from cclsearch.propose.agent.options import AgentOptions
from cclsearch.propose.agent.prompt.prompt import PromptInput, PromptOptions, write_turn_prompt
from cclsearch.propose.agent.prompt.surrogate_table import find_unseen, make_surrogate_table
from cclsearch.propose.agent.tools.tool_schemas import make_toolset
from cclsearch.propose.base import ExpectedOutcome, Observation, SearchView
from cclsearch.propose.bayes.corrections import collect_corrections
from cclsearch.propose.bayes.snapshot import find_gain_left
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.propose.events import (
    Correction,
    DecisionKind,
    LlmMode,
    LlmTurn,
    SubmittedConfig,
)
from cclsearch.propose.study.choose import make_sampler
from cclsearch.recording.load import Recording, load_recording
from cclsearch.space.table import Knob, space_from_rows

LANDSCAPES = ROOT / "benchmarks" / "landscapes"
RECORDING = load_recording(LANDSCAPES / "vtrain-h1024-l12-g8-b16")


def observe(recording: Recording, trial: int, row: int) -> Observation:
    value, config = recording.values[row], recording.space.config(row)
    if value is None:
        failure = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message="out of memory")
        return Observation(trial, config, row, None, failure=failure)
    return Observation(trial, config, row, value, metrics=recording.rows[row].metrics)


def view_of(rows: list[int], recording: Recording = RECORDING, **more: Any) -> SearchView:
    seen = tuple(observe(recording, trial, row) for trial, row in enumerate(rows, 1))
    return SearchView(recording.card, recording.space, seen, frozenset(), 15 - len(rows), 0, **more)


def take_turn(view: SearchView, provider: Scripted, **more: Any) -> TurnOutcome:
    return Agent(provider, options=AgentOptions()).run_turn(
        view, 1, **{"max_submitted": 3, "overrules_left": 0, **more}
    )


def search_rows(count: int) -> list[int]:
    rows: list[int] = []
    for _ in range(count):
        row = RECORDING.space.row(make_sampler("default").propose(view_of(rows), 1)[0].config)
        assert row is not None
        rows.append(row)
    return rows


@pytest.mark.parametrize("first_only", [False, True])
def test_while_finish_is_refused_some_configuration_is_free_without_credit(first_only):
    rows = search_rows(12)
    for count in range(1, len(rows) + 1):
        table = replace(make_surrogate_table(view_of(rows[:count])), first_only=first_only)
        free = [row for row in table.order if table.is_free(row)]
        assert free
        if table.wins_N is not None:
            assert max(table.order, key=table.wins_N.__getitem__) in free, "the likeliest to win"


def test_the_surrogates_first_choice_is_never_an_overrule_and_needs_no_credit():
    view = view_of(search_rows(3))
    table = make_surrogate_table(view)
    outcome = take_turn(view, Scripted(submit(dict(view.space.config(table.order[0])))))
    assert [item.is_overrule for item in outcome.event.submitted] == [False]
    assert not outcome.event.submitted[0].is_own_idea


def test_the_format_of_history_is_in_the_prompt_of_policies():
    tools = make_toolset(view_of([0]), LlmMode.POLICY)
    text = next(tool.description for tool in tools if tool.name == "submit_policy")
    assert "`history` gets the finished trials, oldest first, each {config: {knob: value}, metrics:" in text


def test_bench_reads_landscapes_behind_a_symbolic_link(tmp_path, cli):
    (tmp_path / "linked").symlink_to(LANDSCAPES / "vtrain-h1024-l12-g8-b8")
    assert "linked" in cli.out(["bench", str(tmp_path), "--seeds", "1", "--samplers", "random", "--workers", "1"])


# revisions


def test_a_revision_costs_no_trial_and_the_model_decides_again_over_new_predictions():
    rows = search_rows(2)
    view = view_of(rows, next_trial=3, events=())
    provider = Scripted(
        call("correct", {"why": "w", "corrections": [{"part": "pp=1", "factor": 2}], "insight": "pp=1 is slow"}),
        call("correct", {"why": "again", "insight": "x"}),
        lambda request: submit(dict(view.space.config(make_surrogate_table(view).order[0]))),
    )
    arbiter = Arbiter(Agent(provider, options=AgentOptions()), make_sampler("default"))
    view = replace(view, next_trial=3)
    proposals = arbiter.propose(view, 1)
    events = [event for event in arbiter.take_events() if isinstance(event, LlmTurn)]
    assert [event.decision for event in events] == [DecisionKind.REVISE, DecisionKind.SUBMIT]
    assert len(proposals) == 1
    # the second request is of a new turn, with other predictions, and cannot be revised again before a trial
    first, second = provider.requests[0], provider.requests[1]
    assert own_turn(first).messages[0].text != own_turn(second).messages[0].text
    assert "turn 1: pp=1 x2: step time of " in own_turn(second).messages[0].text
    assert (first.system, first.tools) == (second.system, second.tools), "the provider's cache hits"
    assert "no `correct` now" in own_turn(second).messages[0].text
    assert "no `correct` now" not in own_turn(first).messages[0].text
    assert provider.requests[2].messages[-1].results[0].is_error


def test_a_revision_that_changes_nothing_is_corrected():
    provider = Scripted(call("correct", {"why": "w", "corrections": [{"part": "nonsense", "factor": 2}]}))
    assert take_turn(view_of([0]), provider).stall is not None
    assert "nothing new: give corrections" in provider.requests[1].messages[-1].results[0].text


def test_a_withdrawn_insight_is_marked_and_its_corrections_no_longer_count():
    turns = (
        LlmTurn(turn=1, insight="pipelines are free", corrections=(Correction(part="pp=4", factor=0.5),), num_seen=2),
        LlmTurn(turn=2, insight="bubbles cost much", withdraws=(1,), num_seen=2),
    )
    before, after = view_of([0, 1], events=turns[:1]), view_of([0, 1], events=turns)
    assert [one.label for one in collect_corrections(before)] == ["turn 1: pp=4 x0.5"]
    assert collect_corrections(after) == []
    lines = prompt_of(after).splitlines()
    assert 'turn 1 (WITHDRAWN in turn 2): "pipelines are free"' in lines
    assert 'turn 2: "bubbles cost much"' in lines


def test_only_turns_that_said_something_can_be_withdrawn_and_only_once():
    turns = (LlmTurn(turn=1, insight="a"), LlmTurn(turn=2), LlmTurn(turn=3, insight="b", withdraws=(1,)))
    view = view_of(search_rows(2), events=turns)
    row = make_surrogate_table(view).order[0]
    answer = submit(dict(view.space.config(row)))
    answer.calls[0].arguments["withdraws"] = [1, 2, 3, 3, 9, "3"]
    assert take_turn(view, Scripted(answer)).event.withdraws == (3,)


# what the prompt says


def prompt_of(view: SearchView) -> str:
    table = make_surrogate_table(view)
    return write_turn_prompt(PromptInput(view, table, 1), make_toolset(view, LlmMode.CONFIGS), PromptOptions()).user


def test_each_theory_shows_what_would_refute_it_and_whether_the_measurement_does():
    rows = [row for row in range(len(RECORDING.space)) if RECORDING.values[row]][:2]
    value = RECORDING.values[rows[1]] or 0.0
    items = [
        SubmittedConfig(
            RECORDING.space.config(row), ExpectedOutcome({"step_time_s": 0.9 * value}), rationale="less bubble",
            refuted_at=limit, predicted=ExpectedOutcome({"step_time_s": 2 * value}),
        )
        for row, limit in ((rows[0], 1e6), (rows[1], 0.95 * value))
    ]  # fmt: skip
    text = prompt_of(view_of(rows, events=(LlmTurn(turn=1, submitted=tuple(items)),)))
    section = text[text.index("YOUR THEORIES") :].split("\n\n")[0]
    assert re.search(r"trial 1: .*: holds \| \"less bubble\"", section)
    assert re.search(r"trial 2: .*refuted above .*: REFUTED", section)


def test_the_review_says_how_far_closed_form_and_surrogate_were_off():
    rows = search_rows(5)
    view = view_of(rows)
    line = next(line for line in prompt_of(view).splitlines() if line.startswith("trial 5: measured"))
    measured = RECORDING.values[rows[-1]] or 0.0
    ratio = float(re.search(r"closed form before any trial [\d.]+ m?s \(x([\d.]+)", line)[1])  # type: ignore[index]
    from cclsearch.stats.closed_form import predict_space

    predicted = predict_space(view.card, view.space)
    assert predicted is not None
    assert ratio == pytest.approx(measured / predicted.value_N[rows[-1]], abs=0.01)
    assert "the surrogate without it" in line


def test_pairs_of_trials_that_differ_in_one_knob_show_what_it_did():
    knobs = [Knob("tp", (1, 2)), Knob("dp", (1, 2)), Knob("micro_batch_size", (1, 2)), Knob("kernel", ("a", "b"))]
    configs = [
        {"tp": tp, "dp": 2 // tp, "micro_batch_size": m, "kernel": k} for tp in (1, 2) for m in (1, 2) for k in "ab"
    ]
    space = space_from_rows(knobs, configs)
    times = {0: 10.0, 1: 8.0, 2: 5.0}
    seen = tuple(
        Observation(n, space.config(row), row, time, metrics={"step_time_s": time})
        for n, (row, time) in enumerate(times.items(), 1)
    )
    text = prompt_of(SearchView(RECORDING.card, space, seen, frozenset(), 9, 0))
    section = text[text.index("WHAT ONE CHANGE DID") :].split("\n\n")[0].splitlines()
    assert "kernel: a -> b: step x0.800 (trials 1, 2: tp=1 dp=2 micro_batch_size=1)" in section
    assert "micro_batch_size: 1 -> 2: step x0.500 (trials 1, 3: tp=1 dp=2 kernel=a)" in section
    values = [line.partition(":")[0] for line in text[text.index("VALUES WITHOUT A TRIAL") :].splitlines()[2:]]
    assert values[0] == "tp=2, dp=1"


# what is free, and what counts as a stall


def test_a_value_of_a_knob_that_nothing_knows_is_free_until_it_ran_or_failed_twice():
    knobs = [Knob("dp", (8,)), Knob("micro_batch_size", (1, 2)), Knob("method", ("full", "lora"))]
    configs = [{"dp": 8, "micro_batch_size": m, "method": k} for m in (1, 2) for k in ("full", "lora")]
    space = space_from_rows(knobs, configs)
    failure = Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message="m")
    ran = Observation(1, space.config(0), 0, 9.0, metrics={"step_time_s": 9.0})
    failed = [Observation(n, space.config(row), row, None, failure=failure) for n, row in ((2, 1), (3, 3))]

    def unseen(*seen: Observation) -> list[bool]:
        return find_unseen(SearchView(RECORDING.card, space, seen, frozenset(), 9, 0)).tolist()

    assert unseen(ran) == [False, True, False, True]
    assert unseen(ran, failed[0]) == [False, True, False, True]
    assert unseen(ran, *failed) == [False, False, False, False]
    assert unseen(ran, replace(ran, trial=2, row=1)) == [False, False, False, False]


# what the surrogate says of the noise, and of the trials left


def test_the_gain_of_the_trials_left_is_that_of_the_best_of_their_drawn_results():
    posterior = fit_posterior(view_of(search_rows(3)))
    assert posterior is not None
    assert posterior.best is not None
    rng = np.random.default_rng(0)
    promise = [find_gain_left(posterior, count) for count in (0, 1, 3, 12)]
    assert promise[0] == 0.0
    assert promise == sorted(promise)
    # every candidate may be run: draw a model, then a result of each candidate, and take the best
    gains = []
    mean_km = posterior.mean_m + posterior.spread * (posterior.mean_km - posterior.mean_m)
    for k in rng.choice(len(posterior.weight_k), size=20_000, p=posterior.weight_k / posterior.weight_k.sum()):
        drawn = rng.normal(mean_km[k], posterior.spread * posterior.sd_km[k])
        runs = rng.random(len(drawn)) < posterior.p_valid_m
        gains.append(max(0.0, float((posterior.best - drawn)[runs].max(initial=0.0))))
    assert find_gain_left(posterior, len(posterior.rows_m)) == pytest.approx(-np.expm1(-np.mean(gains)), rel=0.03)


def test_finish_is_granted_once_the_trials_left_are_expected_to_gain_under_1_percent():
    first, late = (make_surrogate_table(view_of(search_rows(count))) for count in (1, 14))
    assert not first.nothing_left
    assert first.why.startswith("only 1 trial finished")
    assert re.search(r"expected to improve the best by \d+\.\d+% in all", late.why)
    assert late.nothing_left


def test_a_failed_trial_counts_among_those_from_which_on_finish_is_granted():
    four, five = (view_of(search_rows(count)) for count in (4, 5))
    failure = Failure(stage=Stage.RUN, kind=FailureKind.CRASHED, message="m")
    last = replace(five.observations[4], loss=None, metrics={}, failure=failure)
    failed = replace(five, observations=(*four.observations, last))
    few, enough = (make_surrogate_table(view).why for view in (four, failed))
    assert few.startswith("only 4 trials finished, `finish` is granted from 5 on")
    assert "finished" not in enough


def test_the_scatter_names_the_trial_that_the_others_contradict():
    view = view_of(search_rows(6))
    slow = 3.0 * (view.observations[3].loss or 0.0)
    seen = [replace(o, loss=slow, metrics={"step_time_s": slow}) if o.trial == 4 else o for o in view.observations]
    few, plain, noisy = (
        make_surrogate_table(replace(view, observations=tuple(observations))).scatter
        for observations in (view.observations[:4], view.observations, seen)
    )
    assert few == ""
    assert "(trial 4)" in noisy

    def largest(text: str) -> float:
        return float(re.search(r"up to x([\d.]+)", text)[1])  # type: ignore[index]

    assert largest(noisy) > 2.0 > largest(plain)
