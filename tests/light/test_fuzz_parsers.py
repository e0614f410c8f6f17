"""Whatever stands in a card, an objective, a profile, a nightly.yaml or a ledger: a value, or one clear line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import ROOT

from cclsearch.card.load import card_from_mapping
from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.yaml_file import parse_yaml
from cclsearch.launch.profile import Profile, load_profile, profile_from_mapping
from cclsearch.nightly.config import NightlyConfig, parse_nightly
from cclsearch.scoring.objective import Objective, load_objective

LIGHT = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def spoil(data: Any, path: int, value: Any) -> Any:
    """The data with one of its leaves or branches replaced, chosen by a number."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in list(items):
            places.append((node, key))
            walk(inner)

    walk(data)
    node, key = places[path % len(places)]
    node[key] = value
    return data


def check_value_or_one_line(make: Callable[[], object], kind: type) -> None:
    """Assert that the call returns a value of that kind, or refuses its input in one line."""
    try:
        assert isinstance(make(), kind)
    except UserError as error:
        text = str(error)
        assert text
        assert "\n" not in text
        assert "Traceback" not in text


NIGHT = {
    "name": "n",
    "deadline": "06:00 Europe/Paris",
    "budget": {"trials": 9},
    "jobs": [{"workload": "wl2", "launcher": "replay", "knobs": ["tp=1,2"]}],
    "matrix": {"workloads": ["wl1"], "launchers": [None]},
    "keep": {"nights": 3},
}
SPOILED: dict[str, tuple[Any, Callable[[Any], object], type]] = {
    "card": (read("workloads/wl2.yaml"), lambda data: card_from_mapping(data, "fuzzed"), Card),
    "profile": (read("launchers/perlmutter.yaml"), lambda data: profile_from_mapping(data, name="fuzzed"), Profile),
    "nightly file": (NIGHT, lambda data: parse_nightly(data, "nightly.yaml"), NightlyConfig),
}


@pytest.mark.parametrize("kind", SPOILED)
@LIGHT
@given(path=st.integers(0, 10**6), value=VALUES)
def test_a_spoiled_file_is_a_value_or_one_line(kind, path, value):
    data, make, made = SPOILED[kind]
    check_value_or_one_line(lambda: make(spoil(copy.deepcopy(data), path, value)), made)


LINES = st.sampled_from(
    [
        *("launcher: slurm", "launcher: local", "time_limit: 12:00:00", "time_limit: 2001-13-45", "account: 0123"),
        *("mem: !!binary x", "options: {a: 1", "options: [[[[", "<<: *a", "description: &a [*a]", "? [x]", "- x", "\t"),
        *("hardware: {memory_gib: .nan}", "environment: {A: 1e999, B: 0b1, C: 0x}", "knobs: [1:30]", "x: 2026-02-30"),
    ]
)


@LIGHT
@given(st.lists(LINES | st.text(max_size=20), max_size=6), st.binary(max_size=2))
def test_any_file_is_a_profile_or_one_line(tmp_path, lines, junk):
    file = tmp_path / "fuzzed.yaml"
    file.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass") + junk)
    check_value_or_one_line(lambda: load_profile(str(file)), Profile)


@LIGHT
@given(st.integers(0, 10**6), VALUES)
def test_a_spoiled_objective_is_an_objective_or_one_line(tmp_path, path, value):
    file = tmp_path / "fuzzed.yaml"
    text = yaml.safe_dump(spoil(read("objectives/composite.yaml"), path, value), allow_unicode=True)
    file.write_text(text, encoding="utf-8", errors="replace")
    check_value_or_one_line(lambda: load_objective(str(file)), Objective)


@LIGHT
@given(st.text(max_size=80) | st.sampled_from(["a: &a [*a]", "!!python/object/apply:os.system [id]", "? {a: b}", "\t"]))
def test_any_text_is_a_mapping_or_one_line(text):
    check_value_or_one_line(lambda: parse_yaml(text, "fuzzed"), dict)
