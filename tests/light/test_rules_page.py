"""docs/rules.md describes every rule with its parameters, and shipped frameworks state a source for each refusal."""

from __future__ import annotations

import re

import pytest
from paths import ROOT

from cclsearch.card.load import load_card
from cclsearch.core.content import list_frameworks
from cclsearch.plugins import TASKS
from cclsearch.space.build import resolve_knobs
from cclsearch.space.framework import load_framework
from cclsearch.space.numbers import NUMBERS
from cclsearch.space.parse import parse_knobs
from cclsearch.space.rule import PARAMETERS, RULES, RuleKind

PAGE = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
ROWS = {
    match[1]: (bool(match[2]), re.findall(r"`(\w+)`", match[3]))
    for match in re.finditer(r"^\| `(\w+)`( \*)? \|([^|]*)\|", PAGE, re.MULTILINE)
}


def test_the_page_has_every_rule_with_its_parameters():
    TASKS.names()
    shipped = {name: list(PARAMETERS[name]) for name in RULES}
    assert {name: parameters for name, (_, parameters) in ROWS.items()} == shipped
    assert {name for name, (of_task, _) in ROWS.items() if of_task} == set(TASKS.get("training").rules)


def test_the_page_names_every_kind_and_number():
    kinds = re.findall(r"^\| (\w+) \|", PAGE, re.MULTILINE)
    assert [kind for kind in kinds if kind in set(RuleKind)] == list(RuleKind)
    numbers = PAGE.split("Numbers of a card", 1)[1]
    assert [name for name in (*NUMBERS, *TASKS.get("training").numbers) if f"`{name}`" not in numbers] == []


@pytest.mark.parametrize("name", [name for name in list_frameworks() if "training" in load_framework(name).tasks])
@pytest.mark.parametrize("workload", ["wl1", "wl2", "wl6", "tiny-moe"])
def test_every_refusal_of_a_shipped_framework_has_a_source(name, workload):
    card, framework = load_card(workload), load_framework(name)
    extra = [f"{k.name}={','.join(map(str, k.resolve(card).choices))}" for k in framework.list_optional(card)]
    rules = framework.make_rules(card, resolve_knobs(card, framework, parse_knobs(extra)), use_fewer=False)
    assert [rule.name for rule in rules if rule.kind is RuleKind.REFUSED and not rule.source] == []
    assert all(re.search(r"\w+\.py|src/|src\\", rule.source) for rule in rules if rule.source)


def test_space_shows_sources_and_optional_knobs(cli):
    shown = cli.out(["space", "--workload", "wl2", "--framework", "torchtitan", "--rules"])
    assert "refused by the framework: torchtitan/models/common/decoder.py" in shown
    assert "the same as another configuration" in shown
    assert "--knob dp_replicate=1,2,4,8,16" in shown
    again = cli.out(["space", "--workload", "wl2", "--framework", "torchtitan", "--knob", "cp=2", "--knob", "cp=4"])
    assert re.search(r"  cp +2, 4 ranks", again), "choices given twice are united"
    assert "--knob cp=" not in again
    assert "torchtitan/models" not in again
