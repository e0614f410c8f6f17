"""What the model and the surrogate learned, as the next prompt shows it, on a real surrogate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llm.turns import Scripted, call, submit
from paths import ROOT

from cclsearch.propose.agent.agent import Agent
from cclsearch.propose.agent.options import AgentOptions
from cclsearch.propose.agent.prompt.knob_effects import has_degrees
from cclsearch.propose.agent.prompt.prompt import PromptInput, PromptOptions, write_prompt
from cclsearch.propose.agent.prompt.row_facts import read_row_facts
from cclsearch.propose.agent.prompt.surrogate_table import make_surrogate_table
from cclsearch.propose.agent.providers.types import Answer
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.snapshot import find_gain_left, summarize_posterior
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.propose.events import Correction, LlmTurn
from cclsearch.propose.warm_start.knowledge import EarlierKnowledge, LearnedPrior
from cclsearch.recording.load import load_recording
from cclsearch.space.table import Knob, space_from_rows
from cclsearch.stats.closed_form import predict_space

RECORDING = load_recording(ROOT / "benchmarks" / "landscapes" / "vtrain-h1024-l12-g8-b16")


def measure(values: dict[int, float], **more: object) -> SearchView:
    """The view of a search whose trials of these rows took these seconds."""
    space = RECORDING.space
    seen = tuple(
        Observation(trial, space.config(row), row, value, metrics={"step_time_s": value})
        for trial, (row, value) in enumerate(values.items(), 1)
    )
    return SearchView(RECORDING.card, space, seen, frozenset(), 15 - len(seen), 0, **more)  # type: ignore[arg-type]


def take_closed_form(count: int, factor: float) -> dict[int, float]:
    """Row -> seconds, as the closed form predicts times a factor, of rows spread over the space."""
    predicted = predict_space(RECORDING.card, RECORDING.space)
    assert predicted is not None
    rows = range(0, len(RECORDING.space), len(RECORDING.space) // count)
    return {row: factor * float(predicted.value_N[row]) for row in rows[:count]}


@pytest.mark.parametrize(("factor", "least", "most"), [(1.0, 0.95, 1.05), (1.5, 1.1, 1.55)])
def test_what_is_learned_of_a_part_is_relative_to_the_closed_form_that_the_prompt_shows(factor, least, most):
    view = measure(take_closed_form(10, factor))
    posterior = fit_posterior(view)
    assert posterior is not None
    learned = {one.part: one.multiplier for one in summarize_posterior(view, posterior, 3).learned_multipliers}
    assert least < learned["scale"] < most
    assert f"scale x{learned['scale']:.2f} (" in "\n".join(make_surrogate_table(view).record)


def test_before_any_trial_the_closed_form_is_what_earlier_searches_made_of_it():
    slower = EarlierKnowledge(priors={"step_time_s": {"gemm": LearnedPrior(mean=1.0, sd=0.1)}})
    plain, taught = measure({}), measure({}, earlier=slower)
    expected = taught.predictor.forms["step_time_s"].predict(len(plain.space))[0]
    shown = [float(read_row_facts(view).predicted(0)) for view in (plain, taught)]
    assert shown[1] == pytest.approx(float(2.718281828 ** expected[0]), rel=1e-3)
    assert shown[1] > 1.2 * shown[0]


def test_the_next_choice_is_not_expected_to_gain_more_than_all_trials_left_together():
    view = measure(take_closed_form(8, 1.0))
    posterior, table = fit_posterior(view), make_surrogate_table(view)
    assert posterior is not None
    said = table.review[-1].partition("expected improvement ")[2].partition("%")[0]
    assert 0 <= float(said) / 100 <= find_gain_left(posterior, view.budget_left) + 1e-4


def test_a_line_of_differences_leaves_out_what_is_negligible_beside_the_largest():
    facts = read_row_facts(measure({}))
    assert facts.prediction is not None
    parts = {"large": facts.prediction.value_N, "tiny": facts.prediction.value_N * 1e-4}
    shown = replace(facts, prediction=replace(facts.prediction, parts=parts)).differences(0, 5)
    assert "large" in shown
    assert "tiny" not in shown


def test_degrees_that_do_not_vary_are_not_named_in_the_legend():
    def space_of(tp: tuple[int, ...], dp: tuple[int, ...]) -> bool:
        rows = [{"tp": t, "dp": d, "m": m} for t in tp for d in dp for m in (1, 2)]
        return has_degrees(space_from_rows([Knob("tp", tp), Knob("dp", dp), Knob("m", (1, 2))], rows))  # type: ignore[arg-type]

    assert space_of((1, 2), (1, 2))
    assert not space_of((1,), (1,))
    assert not space_of((1,), (1, 2))


# corrections and doubts


def take_turn(view: SearchView, answer: Answer) -> LlmTurn:
    agent = Agent(Scripted(answer), options=AgentOptions())
    return agent.run_turn(view, 1, max_submitted=1, overrules_left=0).event


def test_lessons_that_are_not_taken_are_named_in_the_next_prompt():
    view = measure(take_closed_form(6, 1.0))
    arguments = {
        **submit(dict(view.space.config(make_surrogate_table(view).order[0]))).calls[0].arguments,  # type: ignore[dict-item]
        "corrections": [{"part": "pipeline_bubble", "factor": 2}, {"part": "tp=3", "factor": 2}, {"part": "pp=2"}, "x"],
        **{"doubts": [1, 99], "memory_crashes": [1], "withdraws": [4]},
    }
    turn = take_turn(view, call("submit", arguments))
    assert ([one.part for one in turn.corrections], turn.doubts, turn.memory_crashes) == (["pipeline_bubble"], (1,), ())
    after = replace(view, events=(turn,))
    text = write_prompt(PromptInput(after, make_surrogate_table(after), 1), PromptOptions(), 30_000).user
    section = text.partition("REFUSED in your last turn")[2].partition("\n\n")[0]
    for part in ("tp=3", "pp=2", "x: give part", "not doubted", "99", "not crashes", "not withdrawn", "4"):
        assert part in section
    assert "pipeline" not in section.replace("pipeline bubble", "")


def test_a_repeated_doubt_is_not_named_as_refused():
    view = measure(take_closed_form(6, 1.0), events=(LlmTurn(turn=1, doubts=(2,), num_seen=6),))
    assert take_turn(view, call("correct", {"why": "w", "insight": "still an outlier", "doubts": [2]})).refused == ()


def test_the_prompt_says_what_a_doubt_and_a_correction_change():
    values = take_closed_form(6, 1.0)
    first = next(iter(values))
    said = LlmTurn(turn=1, doubts=(1,), corrections=(Correction(part="pp=2", factor=2.0),), num_seen=6, last_seen=6)
    view = measure({**values, first: 4 * values[first]}, events=(said,))
    table = make_surrogate_table(view)
    assert table.corrections[0].startswith("turn 1: pp=2 x2: step time of ")
    assert table.corrections[1] == "trial 1 is doubted: it counts little"
    least, most = (float(word) for word in table.corrections[2].partition(" x")[2].partition(";")[0].split(" to x"))
    assert least < 1 < 1.02 * most, "without the slow outlier, candidates are predicted faster"
    text = write_prompt(PromptInput(view, table, 1), PromptOptions(), 30_000).user
    assert "\n".join(table.corrections) in text
