"""What the prompt says of trials, candidates, theories and knobs without effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llm.cases import CARD, SPACE, Search, plain_table, run_trial
from llm.turns import FakeClock, Scripted, call, run_turn, submit

from cclsearch.propose.agent.agent import Agent
from cclsearch.propose.agent.arbiter.rules import ArbiterSettings, find_stall
from cclsearch.propose.agent.memory.evidence import EvidenceSource, NoEvidence, TrialEvidence
from cclsearch.propose.agent.memory.history import find_choosers
from cclsearch.propose.agent.prompt.knob_effects import change_lines, count_changes, find_unseen_values
from cclsearch.propose.agent.prompt.prompt import PromptInput, PromptOptions, _describe_size, write_turn_prompt
from cclsearch.propose.agent.prompt.row_facts import read_row_facts
from cclsearch.propose.agent.prompt.surrogate_table import SurrogateTable
from cclsearch.propose.agent.prompt.tables import trial_summary
from cclsearch.propose.agent.prompt.untested_values import untried_lines
from cclsearch.propose.agent.providers.types import Answer
from cclsearch.propose.agent.tools.tool_schemas import make_toolset
from cclsearch.propose.base import Observation, ProposerEvent, SearchView
from cclsearch.propose.bayes.corrections import find_shifts
from cclsearch.propose.events import ArbiterMove, ArbiterPhase, ArbiterState, Correction, LlmTurn, SubmittedConfig
from cclsearch.space.table import RECORDED_RULES, Knob, Space, space_from_rows
from cclsearch.stats.closed_form import predict_space

FITTING = [row for row in range(len(SPACE)) if run_trial(1, SPACE.config(row)).loss is not None]


def view_of(*rows: int, events: tuple[ProposerEvent, ...] = (), **more: Any) -> SearchView:
    search = Search(budget=100, events=list(events))
    search.observations = [run_trial(trial, SPACE.config(row)) for trial, row in enumerate(rows, 1)]
    return replace(search.view, **more)


def prompt_of(view: SearchView, table: SurrogateTable | None = None) -> str:
    prompt = write_turn_prompt(
        PromptInput(view, table or plain_table(), 1), make_toolset(view, "configs"), PromptOptions()
    )
    return f"{prompt.system}\n\n{prompt.user}"


def section(text: str, title: str) -> list[str]:
    return text.split(f"\n{title}", 1)[1].split("\n\n")[0].splitlines()[1:]


def move(phase: ArbiterPhase, since: int, before: ArbiterPhase = ArbiterPhase.LLM) -> ArbiterMove:
    return ArbiterMove(before=before, after=ArbiterState(phase, since), text="")


def turn(number: int, *rows: int, seen: int) -> LlmTurn:
    items = tuple(SubmittedConfig(SPACE.config(row)) for row in rows)
    return LlmTurn(turn=number, decision="submit", submitted=items, num_seen=seen, text="")


def test_the_tables_say_who_chose_each_trial():
    rows = FITTING[:6]
    events = (
        move(ArbiterPhase.LLM, 2, ArbiterPhase.SEEDS),
        turn(1, rows[1], rows[2], rows[4], seen=1),  # the last of them is dropped from the queue
        move(ArbiterPhase.FALLBACK, 4),
        move(ArbiterPhase.LLM, 6, ArbiterPhase.FALLBACK),
        turn(2, rows[5], seen=5),
    )
    view = view_of(*rows, events=events)
    expected = {1: "seed", 2: "you", 3: "you", 4: "surrogate", 5: "surrogate", 6: "you"}
    assert find_choosers(view) == expected
    header, *lines = section(prompt_of(view), "TRIALS")
    assert header.startswith("trial by loss ")
    assert {int(line.split()[0]): line.split()[1] for line in lines} == expected


def test_the_prompt_of_a_recording_says_how_much_of_the_grid_exists():
    view = view_of(FITTING[0])
    text = "only 59 of the 500 combinations of these values were recorded: no other can be tried"
    assert any(line.startswith(text) for line in section(prompt_of(view), "KNOBS"))
    knobs = (Knob("tp", (1, 2)), Knob("pp", (1, 2)))
    codes_NK = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=np.int16)
    whole = Space(knobs, codes_NK, 4, RECORDED_RULES)
    assert _describe_size(whole) == "all 4 combinations of these values were recorded"
    ruled = Space(knobs, codes_NK[:3], 4, ("fits",))
    assert _describe_size(ruled) == "the search space has 3 configurations, of 4 combinations; rules: fits"


@pytest.mark.parametrize("kinds", ["same failure", "no improvement"])
def test_the_arbiters_reason_for_a_stall_uses_the_words_of_the_rules(kinds):
    rows = [row for row in range(len(SPACE)) if row not in FITTING] if kinds == "same failure" else FITTING[::-1]
    view = view_of(FITTING[0], *rows[:3], events=(turn(1, *rows[:3], seen=1),))
    found = find_stall(view, ArbiterState(ArbiterPhase.LLM, 2), ArbiterSettings())
    assert found is not None
    cause, reason = found
    assert cause == kinds
    rules = next(part for part in prompt_of(view).split("\n\n") if part.startswith("Rules: "))
    assert reason.startswith("stall: ")
    said = reason.removeprefix("stall: ").split(" (")[0].replace("2 trials", "two trials")
    for words in said.split(" that "):
        assert all(word in rules for word in words.split()), words


def test_only_the_latest_theories_are_listed_and_each_once():
    rows = FITTING[:9]
    events = (turn(1, *rows[:8], seen=0), turn(2, rows[7], rows[8], seen=6))  # the eighth was dropped, and asked again
    text = prompt_of(view_of(*rows, events=events))
    lines = section(text, "YOUR THEORIES")
    assert [line.split(":")[0] for line in lines[:5]] == ["trial 9", "trial 8", "trial 7", "trial 6", "trial 5"]
    assert lines[5:] == ["(4 older ones left out)"]


def test_memory_is_no_column_if_no_trial_measured_it():
    view = view_of(*FITTING[:2])
    bare = tuple(replace(o, metrics={"step_time_s": o.metrics["step_time_s"]}) for o in view.observations)
    for observations, is_measured in (
        (view.observations, True),
        ((bare[0], view.observations[1]), True),
        (bare, False),
    ):
        text = prompt_of(replace(view, observations=observations))
        header, *lines = section(text, "TRIALS")
        assert ("peak_GiB" in header) is is_measured
        assert {len(line.split(" | ")[0].split()) for line in (header, *lines)} == {7 + is_measured}
        assert ("no trial measured its memory" in text) is not is_measured


def unlikely_table(num_unlikely: int) -> SurrogateTable:
    """A table whose first candidates almost certainly do not fit."""
    fits_N = np.full(len(SPACE), 0.75)
    fits_N[:num_unlikely] = 0.009
    return replace(plain_table(), fits_N=fits_N, unseen_N=np.ones(len(SPACE), dtype=bool))


def test_what_almost_certainly_does_not_fit_is_neither_listed_nor_free():
    table = unlikely_table(4)
    assert [row for row in range(6) if table.is_free(row)] == [4, 5], "though it has an untried value"
    lines = section(prompt_of(view_of(FITTING[-1]), table), "SURROGATE: its best")
    configs = [" ".join(map(str, SPACE.config(row).values())) for row in range(6)]
    assert [line.split(" | ")[1] for line in lines[1:3]] == configs[4:]
    assert lines[-1] == "(4 with P(fits) under 1% are not listed)"


def test_if_nothing_may_fit_the_first_candidates_are_listed_and_free():
    table = unlikely_table(len(SPACE))
    assert table.listed == table.order
    assert table.is_free(table.order[0])


def test_a_lookup_lists_what_almost_certainly_does_not_fit_only_if_asked():
    provider = Scripted(call("candidates"), call("candidates", {"min_fits": 0}), submit(dict(SPACE.config(20))))
    run_turn(provider, table=unlikely_table(4))
    usual, asked = [r.text.split(" ")[0] for m in provider.requests[-1].messages for r in m.results]
    assert int(asked) - int(usual) == 3, "the fourth has run"


def look_up(view: SearchView, *answers: Answer, evidence: EvidenceSource | None = None) -> list[str]:
    provider = Scripted(*answers, submit(dict(SPACE.config(20))))
    agent = Agent(provider, make_table=lambda v: plain_table(), clock=FakeClock(), evidence=evidence or NoEvidence())
    agent.run_turn(view, 1, max_submitted=1, overrules_left=1)
    return [result.text for message in provider.requests[-1].messages for result in message.results]


class Traces(NoEvidence):
    """Evidence of traced trials."""

    def find(self, trial: int) -> TrialEvidence | None:
        return TrialEvidence(seconds_by_cause={"compute": 6.2})


def test_without_a_trace_the_parts_are_said_to_be_predicted():
    view = view_of(FITTING[0], FITTING[-1])
    bare, both = look_up(view, call("trial", {"trial": 1}), call("compare", {"a": 1, "b": 2}))
    assert bare.endswith(", no trace: its parts are predicted, not measured")
    assert ", predicted parts: " in bare
    traced = look_up(view, call("trial", {"trial": 1}), evidence=Traces())[0]
    assert "no trace" not in traced
    assert both.count("no trace") == 2


def test_compare_prints_the_differences_of_the_predicted_parts():
    one, other = FITTING[0], FITTING[-1]
    text = look_up(view_of(one, other), call("compare", {"a": 2, "b": 1}))[0].splitlines()[-1]
    head = "closed form of trial 2 less that of trial 1 (predicted, not measured): "
    assert text.startswith(head)
    prediction = predict_space(CARD, SPACE)
    assert prediction is not None
    said = {
        name: float(figure) for name, figure in (item.rsplit(" ", 1) for item in text.removeprefix(head).split(", "))
    }
    whole = float(prediction.value_N[other] - prediction.value_N[one])
    assert sum(said.values()) == pytest.approx(whole, rel=0.05), "the parts of a step add up"
    assert len(said) > 2


def idle_view() -> SearchView:
    """A recording with zero_stage 0 and 1 at each dp; at dp=1 it changes nothing."""
    knobs = (Knob("tp", (1, 2, 4)), Knob("dp", (1, 2, 4)), Knob("zero_stage", (0, 1)))
    rows = [{"tp": 4 // dp, "dp": dp, "zero_stage": zero} for dp in (1, 2, 4) for zero in (0, 1)]
    space = space_from_rows(knobs, rows)
    card = CARD.model_copy(update={"hardware": CARD.hardware.model_copy(update={"num_accelerators": 4})})
    seen = []
    for trial, (row, time_s) in enumerate({1: 9.0, 3: 8.0, 5: 6.0}.items(), 1):  # all with zero_stage=1
        metrics = {"step_time_s": time_s, "peak_memory_gib": 40.0}
        seen.append(Observation(trial, space.config(row), row, time_s, metrics=metrics))
    return replace(view_of(), card=card, space=space, observations=tuple(seen))


def test_a_knob_without_effect_has_one_value_in_the_tables():
    view = idle_view()
    n = len(view.space)
    table = replace(plain_table(), order=tuple(range(n)))
    text = prompt_of(view, table)
    assert "with dp=1, zero_stage changes nothing" in text
    by_trial = {line.split()[0]: line.split(" | ")[1] for line in section(text, "TRIALS")[1:]}
    assert by_trial == {"1": "4 1 0", "2": "2 2 1", "3": "1 4 1"}
    assert trial_summary(view, view.observations[0]).startswith("trial 1: tp=4 dp=1 zero_stage=0: ")


def test_pairs_and_untried_values_ignore_knobs_without_effect():
    view = idle_view()
    only_idle = replace(view, observations=view.observations[:1])
    names = [(view.space.knobs[k].name, view.space.knobs[k].choices[c]) for k, c in find_unseen_values(only_idle)]
    assert names == [("tp", 1), ("tp", 2), ("dp", 2), ("dp", 4), ("zero_stage", 0), ("zero_stage", 1)]
    assert find_unseen_values(view) == [(2, 0)]
    lines = change_lines(view)
    # at dp=1 trial 1 counts as zero_stage=0, so it differs from the others in more than the degrees
    assert lines[0] == "degrees of parallelism: tp=2 dp=2 -> tp=1 dp=4: step x0.750 (trials 2, 3: zero_stage=1)"
    assert len(lines) == 1


def test_changes_are_counted_by_knobs_with_effect_and_degrees_count_once():
    space = idle_view().space
    # rows: dp 1, 1, 2, 2, 4, 4, each with zero_stage 0 and 1; with dp=1 both are one run
    assert count_changes(space, 3).tolist() == [2, 2, 1, 0, 2, 1]
    assert count_changes(space, 1).tolist() == [0, 0, 1, 2, 1, 2]


def test_each_value_without_a_trial_has_a_line_with_the_likeliest_candidate():
    view = idle_view()
    n = len(view.space)
    chances = np.array([0.0, 0.0, 0.2, 0.0, 0.3, 0.0])
    table = replace(plain_table(), order=(2, 4), wins_N=chances, value_N=np.full(n, 5.0), fits_N=np.full(n, 0.9))
    lines = untried_lines(view, table, read_row_facts(view))
    assert lines[0].startswith("value: pred_step_s")
    assert [line.partition(":")[0] for line in lines[1:]] == ["zero_stage=0"]
    assert lines[1].endswith(" | 1 4 0")
    only_idle = replace(view, observations=view.observations[:1])
    few = replace(table, order=(2,))
    lines = untried_lines(only_idle, few, read_row_facts(view))
    assert lines[1].startswith("tp=2, dp=2, zero_stage=0: ")
    assert lines[-1] == "without a chance of 2% to win: tp=1, dp=4, zero_stage=1"
    hopeless = replace(few, wins_N=np.full(n, 0.01))
    assert untried_lines(view, hopeless, read_row_facts(view)) == ["without a chance of 2% to win: zero_stage=0"]


@pytest.mark.parametrize("value", [0, 1])
def test_a_correction_of_a_value_does_not_count_where_the_knob_changes_nothing(value):
    view = idle_view()
    correction = Correction(part=f"zero_stage={value}", factor=2.0)
    moved_N, _ = find_shifts(replace(view, observations=()), view.predictor, correction)
    rows = np.arange(len(view.space))
    configs = [view.space.config(int(row)) for row in rows]
    has_effect_N = np.array([config["dp"] != 1 and config["zero_stage"] == value for config in configs])
    assert moved_N[has_effect_N] == pytest.approx(np.log(2))
    assert moved_N[~has_effect_N] == pytest.approx(0.0)
