"""Whatever stands in a card, an objective, a profile, a nightly.yaml or a ledger: a value, or one clear line."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import ROOT

from cclsearch.card.load import card_from_mapping
from cclsearch.card.model import Card
from cclsearch.core.errors import DamagedLedger, UserError
from cclsearch.core.yaml_file import parse_yaml
from cclsearch.launch.profile import Profile, load_profile, profile_from_mapping
from cclsearch.nightly.config import NightlyConfig, parse_nightly
from cclsearch.record.event import Note, SearchStarted
from cclsearch.record.ledger import fold_ledger, read_events
from cclsearch.record.line import encode_line
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


def spoil(data: Any, path: int, value: Any) -> Any:
    """The data with one of its leaves or branches replaced, chosen by a number."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in list(items):
            places.append((node, key))
            walk(inner)

    walk(data)
    if places:
        node, key = places[path % len(places)]
        node[key] = value
    return data


def check_one_line(error: UserError) -> None:
    text = str(error)
    assert text
    assert "\n" not in text
    assert "Traceback" not in text


@LIGHT
@given(st.integers(0, 10**6), VALUES)
def test_a_spoiled_card_is_a_card_or_one_line(path, value):
    data = spoil(yaml.safe_load((ROOT / "workloads" / "wl2.yaml").read_text()), path, value)
    try:
        assert isinstance(card_from_mapping(data, "fuzzed"), Card)
    except UserError as error:
        check_one_line(error)


@LIGHT
@given(st.integers(0, 10**6), VALUES)
def test_a_spoiled_profile_is_a_profile_or_one_line(path, value):
    data = spoil(yaml.safe_load((ROOT / "launchers" / "perlmutter.yaml").read_text()), path, value)
    try:
        assert isinstance(profile_from_mapping(data, name="fuzzed"), Profile)
    except UserError as error:
        check_one_line(error)


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
    try:
        assert isinstance(load_profile(str(file)), Profile)
    except UserError as error:
        check_one_line(error)


@LIGHT
@given(st.integers(0, 10**6), VALUES)
def test_a_spoiled_objective_is_an_objective_or_one_line(tmp_path, path, value):
    data = spoil(yaml.safe_load((ROOT / "objectives" / "composite.yaml").read_text()), path, value)
    file = tmp_path / "fuzzed.yaml"
    file.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8", errors="replace")
    try:
        assert isinstance(load_objective(str(file)), Objective)
    except UserError as error:
        check_one_line(error)


NIGHT = {
    "name": "n",
    "deadline": "06:00 Europe/Paris",
    "budget": {"trials": 9},
    "jobs": [{"workload": "wl2", "launcher": "replay", "knobs": ["tp=1,2"]}],
    "matrix": {"workloads": ["wl1"], "launchers": [None]},
    "keep": {"nights": 3},
}


@LIGHT
@given(st.integers(0, 10**6), VALUES)
def test_a_spoiled_nightly_file_is_nights_or_one_line(path, value):
    import copy

    try:
        assert isinstance(parse_nightly(spoil(copy.deepcopy(NIGHT), path, value), "nightly.yaml"), NightlyConfig)
    except UserError as error:
        check_one_line(error)


@LIGHT
@given(st.text(max_size=80) | st.sampled_from(["a: &a [*a]", "!!python/object/apply:os.system [id]", "? {a: b}", "\t"]))
def test_any_text_is_a_mapping_or_one_line(text):
    try:
        assert isinstance(parse_yaml(text, "fuzzed"), dict)
    except UserError as error:
        check_one_line(error)


@LIGHT
@given(st.binary(max_size=60), st.booleans())
def test_a_torn_last_line_never_happened_and_a_spoiled_line_is_named(tmp_path, junk, in_the_middle):
    start = encode_line(SearchStarted(time_s=1.0, run_id="r", engine_version="0", spec_sha256="0"))
    note = encode_line(Note(time_s=2.0, topic="t", text="x"))
    junk = junk.replace(b"\n", b"")
    ledger = tmp_path / "ledger.jsonl"
    tail = b"\n" + note if in_the_middle else b""
    ledger.write_bytes(start + note + junk + tail)
    if not in_the_middle:
        assert len(list(read_events(ledger))) == 2
        assert len(fold_ledger(ledger).reported) == 1
        return
    assert len(list(read_events(ledger))) == 3
    with pytest.warns(DamagedLedger, match="line 3"):
        state = fold_ledger(ledger)
    assert ([line.number for line in state.bad_lines], len(state.reported)) == ([3], 2)
