"""Numbers that people give: one rule on the command line, in files, forms and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CommandLine
from pydantic import ValidationError
from starlette.testclient import TestClient

from cclsearch.cli import main
from cclsearch.core.errors import UserError
from cclsearch.core.settings import Settings, load_settings
from cclsearch.nightly.config import Budget
from cclsearch.propose.agent.providers.prices import parse_price
from cclsearch.propose.agent.providers.spec import TIMEOUT_NAME, read_timeout_s
from cclsearch.scoring.objective import choose_objective, load_objective
from cclsearch.ui.app import make_app
from cclsearch.ui.guard import TOKEN_HEADER, Permissions

ARABIC, WIDE, SUPER = "\u0661\u0662", "\uff11\uff12", "\u00b2"
ODD = [ARABIC, WIDE, SUPER, "1_000", "nan", "inf", "1e400", "99999999999999999999", "0x10", "12\u200b", ""]
RUN = ["run", "-w", "wl2", "--dry-run"]


@pytest.mark.parametrize("text", ODD)
def test_a_number_that_is_not_written_in_ascii_digits_or_beyond_limits_is_refused_everywhere(
    project, cli, text, monkeypatch
):
    for option in ("--budget", "--parallel", "--seed", "--timeout-min", "--max-node-hours"):
        assert cli.err([*RUN, option, text]).count("\n") == 1, option
    for model, field in ((Settings, "budget"), (Budget, "trials"), (Budget, "hours"), (Budget, "tokens")):
        with pytest.raises(ValidationError):
            model(**{field: text})
    with pytest.raises(UserError, match="weight"):
        load_objective(f"composite:weight={text or 'x'}")
    with pytest.raises(UserError, match="--llm-price"):
        parse_price(f"1,{text}")
    monkeypatch.setenv(TIMEOUT_NAME, text or "x")
    with pytest.raises(UserError, match=TIMEOUT_NAME):
        read_timeout_s()
    allowed = Permissions(start=True, token="t")
    client = TestClient(make_app(project, allowed), base_url="http://127.0.0.1:8090")
    form = {"workload": "wl2", "budget": text or "-"}
    assert "budget must be" in client.post("/change/start", json=form, headers={TOKEN_HEADER: "t"}).json()["error"]


@pytest.mark.parametrize("text", [ARABIC, WIDE, "12\u0660"])
def test_values_of_knobs_and_cards_are_numbers_in_ascii_digits_only(project, cli, text):
    assert cli.err([*RUN, "--set", f"global_batch_size={text}"]).count("\n") == 1
    assert cli.err([*RUN, "--knob", f"micro_batch_size={text}"]).count("\n") == 1
    card = project / "workloads" / "mine.yaml"
    assert main(["card", "copy", "tiny", "mine"]) == 0
    written = card.read_text()
    assert "batch_size: " in written
    head, _, rest = written.partition("batch_size: ")
    card.write_text(f"{head}batch_size: '{text}'{rest[rest.index(chr(10)) :]}")
    assert "batch_size" in cli.err(["run", "-w", "mine", "--dry-run"])


def test_limits_hold_for_numbers_of_every_type(project, cli):
    assert "must be at most 1,000,000" in cli.err([*RUN, "-b", "1000001"])
    assert main([*RUN, "-b", "1000000"]) == 0
    assert "must be a number above 0 to 1e+09, not '1e308'" in cli.err([*RUN, "--timeout-min", "1e308"])
    assert "0 to 1" in cli.err(["score", "x", "--reference-weight", "1.5"])
    for value in (10**20, True, 1.5):
        Path("ccl-search.yaml").write_text(f"budget: {value}\n".lower())
        with pytest.raises(UserError, match="budget"):
            load_settings()
    with pytest.raises(ValidationError):
        Budget(hours=1e308)
    with pytest.raises(ValidationError):
        Budget(trials=True)


UNITS = [
    ("peak_memory <= 70 GiB", "at_most", 70 * 2**30, "B"),
    ("peak_memory <= 70GB", "at_most", 70e9, "B"),
    ("peak_memory_gib <= 70 GB", "at_most", 70e9 / 2**30, "GiB"),
    ("peak_memory_gib <= 70", "at_most", 70, "GiB"),
    ("step_time_s <= 500 ms", "at_most", 0.5, "s"),
    ("comm_time <= 2 min", "at_most", 120, "s"),
    ("power_w <= 3 kW", "at_most", 3000, "W"),
    ("mfu >= 30%", "at_least", 0.3, "fraction"),
    ("mfu >= 0.3", "at_least", 0.3, "fraction"),
]


@pytest.mark.parametrize(("text", "side", "value", "unit"), UNITS)
def test_a_bound_is_converted_into_the_unit_of_its_metric(text, side, value, unit):
    [constraint] = choose_objective("step_time", (text,), task="training").constraints
    assert getattr(constraint, side) == pytest.approx(value)
    assert constraint.unit == unit


REFUSED = [
    ("peak_memory <= 70", "peak_memory needs a unit after the number: one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"),
    ("comm_time <= 2", "comm_time needs a unit after the number: one of s, ms"),
    ("mfu >= 40", "mfu is a share: write 40 % if that means 0.4"),
    ("peak_memory <= 70 Gib", r"not in 'Gib' \(did you mean 'GiB'\?\)"),
    ("peak_memory_gib <= 2 s", "is measured in 'GiB', not in 's'"),
    (f"peak_memory_gib <= {ARABIC}", "peak_memory_gib|must be|unknown|cannot"),
]


@pytest.mark.parametrize(("text", "why"), REFUSED)
def test_a_bound_without_its_unit_or_with_that_of_another_quantity_is_refused(text, why):
    with pytest.raises(UserError, match=why):
        choose_objective("step_time", (text,), task="training")


def test_a_file_follows_the_same_rule(project, cli: CommandLine):
    (project / "objectives").mkdir()
    file = project / "objectives" / "mine.yaml"
    head = "version: 1\nmetrics: [{name: step_time_s, direction: minimize}]\nconstraints: "
    for bounds in ("['peak_memory <= 70']", "[{metric: peak_memory, at_most: 70}]"):
        file.write_text(head + bounds)
        assert "peak_memory needs a unit" in cli.err([*RUN, "--objective", "mine"])
    file.write_text(head + "[{metric: peak_memory, at_most: 70, unit: GiB}]")
    [constraint] = load_objective("mine", task="training").constraints
    assert constraint.at_most == 70 * 2**30
