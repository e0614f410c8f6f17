"""Framework files: found by alias, checked by field, and honest about what cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cclsearch.card.load import load_card
from cclsearch.errors import UserError
from cclsearch.settings import Settings, load_settings
from cclsearch.space.build import build_space
from cclsearch.space.framework import list_frameworks, load_framework

OWN = """title: mine
aliases: [my-trainer]
knobs:
  - {name: tp, choices: [1, 2, 4]}
  - {name: dp, choices: {divisors_of: accelerators}}
  - {name: micro_batch_size, choices: [1, 2]}
  - {name: speed, choices: [slow, fast], env: MY_SPEED}
rules:
  - tp_inside_node
  - {rule: implies, name: fast_needs_tp, when: {speed: fast}, then: {tp: [2, 4]}, because: it does}
"""


def write_framework(project: Path, text: str) -> None:
    (project / "launchers").mkdir(exist_ok=True)
    (project / "launchers" / "mine.framework.yaml").write_text(text)


@pytest.mark.parametrize("name", list_frameworks())
def test_shipped_frameworks_name_source_and_describe_their_knobs(name: str) -> None:
    framework = load_framework(name)
    assert framework.source
    assert all(knob.description for knob in (*framework.knobs, *framework.optional_knobs))
    names = [knob.name for knob in (*framework.knobs, *framework.optional_knobs)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("word", ["megatron", "Megatron-LM", "megatron_lm", "megatron-core"])
def test_a_framework_is_found_by_every_word_that_cards_use(word: str) -> None:
    assert load_framework(word).name == "megatron"


def test_an_unknown_framework_lists_those_there_are() -> None:
    with pytest.raises(UserError, match=r"no framework 'torchrun'; there are: cpu, jax-cpu, maxtext, megatron"):
        load_framework("torchrun")


def test_a_project_describes_its_own(project: Path) -> None:
    write_framework(project, OWN)
    framework = load_framework("My_Trainer")
    space = build_space(load_card("wl2"), framework)
    fast = space.column("speed") == "fast"
    assert set(space.column("tp")[fast].tolist()) == {2, 4}
    assert set(space.column("tp")[~fast].tolist()) == {1, 2, 4}
    assert framework.knob_environment({"speed": "fast", "tp": 2}) == {"MY_SPEED": "fast"}
    assert framework.knob_environment({"speed": "default"}) == {}
    with pytest.raises(UserError, match="has no run script"):
        _ = framework.script_path


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tp_inside_node", "tp_everywhere", "there is no rule 'tp_everywhere'"),
        ("because: it does", "wherefore: it does", "no parameter wherefore"),
        ("when: {speed: fast}, ", "", "needs `name`, `when"),
        ("divisors_of: accelerators", "divisors_of: moons", "choices"),
        ("name: tp,", "name: TP,", r"knobs\.0\.name"),
        ("knobs:", "buttons:", "buttons: is no field here"),
        ("env: MY_SPEED", "env: 'x; rm'", "env"),
        ("title: mine", "runner: mpi", "runner"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(project: Path, old: str, new: str, words: str) -> None:
    write_framework(project, OWN.replace(old, new))
    with pytest.raises(UserError, match=words) as caught:
        load_framework("mine")
    assert "mine.framework.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_are_defaults_without_a_file_or_with_an_empty_one(project: Path) -> None:
    assert load_settings() == Settings()
    (project / "ccl-search.yaml").write_text("# nothing yet\n")
    assert load_settings() == Settings()
    (project / "ccl-search.yaml").write_text("launcher: perlmutter\nruns: searches\nbudget: 9\n")
    assert load_settings() == Settings(launcher="perlmutter", runs=Path("searches"), budget=9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("launchr: x\n", "launchr: is no field here"),
        ("budget: 0\n", "budget"),
        ("version: 2\n", "version"),
        ("runs: ../elsewhere\n", "runs"),
        ("launcher: ''\n", "launcher"),
        ("- a\n", "must hold a mapping"),
    ],
)
def test_wrong_settings_are_named_by_field(project: Path, text: str, words: str) -> None:
    (project / "ccl-search.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        load_settings()
