"""`benchmarks/blind.py`: a game with a scripted player, who sees no names, and its score."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from llm.players import read_candidates, submit
from paths import ROOT

from cclsearch.core.values import Config, Value
from cclsearch.record.ledger import LEDGER_FILE, fold_ledger

BENCHMARK = ROOT / "benchmarks" / "blind.py"
MEASURED = BENCHMARK.parent / "landscapes" / "vtrain-h1024-l12-g8-b8"
TABLE = "acme-blue-cluster"
OF_TABLE = re.compile("acme|blue.cluster|vtrain|kaist|via research|micro 2024|gpt-h1024", re.IGNORECASE)
"""Every name by which the given card, rows and folder say where the table comes from."""
OF_FRAMEWORK = re.compile("megatron|deepspeed", re.IGNORECASE)
"""The copied card keeps it, for the closed form; what a player sees does not have it."""
BUDGET = 3
WRONG = {
    "no JSON": "submit the first one",
    "no object": "[]",
    "no calls": '{"text": "the first one"}',
    "calls without arguments": '{"calls": [{"name": "submit"}]}',
    "no text": b"\xff",
}


@dataclass(frozen=True)
class Game:
    """A game that was played to its end."""

    folder: Path
    shown: str
    """All that `next` printed."""
    submitted: tuple[Config, ...]
    refused: Mapping[str, subprocess.CompletedProcess[str]]
    """What is wrong with an answer -> what `answer` did with it, while the first request waited."""

    @property
    def path(self) -> Path:
        return self.folder / "games" / "table-1"


def call(*words: object) -> subprocess.CompletedProcess[str]:
    """Call the benchmark from the command line."""
    command = [sys.executable, str(BENCHMARK), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def read_table() -> list[dict[str, str]]:
    with (MEASURED / "trials.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def find_time_s(config: Mapping[str, Value]) -> float:
    """Return what the table has for a configuration."""
    (row,) = (row for row in read_table() if all(row[knob] == str(value) for knob, value in config.items()))
    return float(row["step_time_s"])


def give_table(folder: Path) -> Path:
    """Write a measured table with names where tables have them: folder, card, and notes beside the figures."""
    folder.mkdir(parents=True)
    (folder / "card.yaml").write_bytes((MEASURED / "card.yaml").read_bytes())
    rows = [{**row, "notes": f"Acme, run {number}"} for number, row in enumerate(read_table())]
    with (folder / "trials.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def play(game: Path, answer: Path) -> tuple[str, list[Config]]:
    """Answer every request: with the slowest free candidate of the list first, then with the fastest ones."""
    shown, submitted = "", list[Config]()
    while "the game is over" not in (text := call("next", game).stdout):
        shown += text
        rows = sorted((row for row in read_candidates(text) if row["free"]), key=lambda row: find_time_s(row["config"]))
        row = rows[0] if submitted else rows[-1]
        name, arguments = submit(row, "as the script says")
        answer.write_text(json.dumps({"calls": [{"name": name, "arguments": arguments}]}))
        assert call("answer", game, answer).stdout == "given\n"
        submitted.append(Config(row["config"]))
    return shown, submitted


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Game:
    own = tmp_path_factory.mktemp("own")
    folder, answer = own / "blind", own / "answer.json"
    done = call("prepare", give_table(own / TABLE), "--out", folder)
    assert done.returncode == 0, done.stderr
    path = folder / "games" / "table-1"
    words = ["play", str(folder / "tables" / "table-1"), "--games", str(path), "--budget", str(BUDGET)]
    playing = subprocess.Popen([sys.executable, str(BENCHMARK), *words])
    try:
        first, refused = call("next", path).stdout, {}
        for what, text in WRONG.items():
            answer.write_bytes(text if isinstance(text, bytes) else text.encode())
            refused[what] = call("answer", path, answer)
        refused["no file"] = call("answer", path, own / "none.json")
        shown, submitted = play(path, answer)
        assert playing.wait(60) == 0
    finally:
        playing.terminate()
        playing.wait(60)
    return Game(folder, first + shown, tuple(submitted), refused)


def test_a_player_sees_no_name(game):
    requests = [path.read_text() for path in sorted((game.path / "requests").iterdir())]
    assert "8 x a100-80" in game.shown
    assert len(requests) == 2 * len(game.submitted)
    for text in (game.shown, *requests):
        assert not OF_TABLE.search(text)
        assert not OF_FRAMEWORK.search(text)


def test_no_copied_file_has_a_name_of_the_table(game):
    for name in ("card.yaml", "trials.csv"):
        given, copy = (folder / name for folder in (game.folder.parent / TABLE, game.folder / "tables" / "table-1"))
        assert OF_TABLE.search(given.read_text())
        assert not OF_TABLE.search(copy.read_text())
    paths = [str(path.relative_to(game.folder)) for path in game.folder.rglob("*")]
    assert len(paths) > 20
    assert [path for path in paths if OF_TABLE.search(path) or OF_FRAMEWORK.search(path)] == []
    assert TABLE in (game.folder / "key.json").read_text()


@pytest.mark.parametrize("what", [*WRONG, "no file"])
def test_a_wrong_answer_is_refused_in_one_line(game, what):
    done = game.refused[what]
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert re.search(r"answer\.json is not valid JSON|an answer is \{|none\.json cannot be read", line)


def test_a_refused_answer_leaves_the_request_to_be_answered(game):
    """The search got the later, right answers only: every trial after the seed is the player's."""
    state = fold_ledger(next(game.path.glob(f"runs/*/{LEDGER_FILE}")))
    assert [trial.proposer for _, trial in sorted(state.trials.items())] == ["seed", "llm", "llm"]
    assert tuple(trial.config for _, trial in sorted(state.trials.items()))[1:] == game.submitted


def test_an_answer_that_no_request_waits_for_is_refused(game):
    done = call("answer", game.path, game.folder / "key.json")
    assert (done.returncode, done.stderr) == (2, "no request waits for an answer: call `next`\n")


def test_the_score_is_the_best_of_what_ran_over_the_optimum(game):
    state = fold_ledger(next(game.path.glob(f"runs/*/{LEDGER_FILE}")))
    times = [find_time_s(state.trials[number].config) for number in range(1, BUDGET + 1)]
    optimum = min(float(row["step_time_s"]) for row in read_table())
    assert times[1] > times[0] > times[2], "the figures below differ if one trial is left out or counted twice"
    after_1, after_3 = times[0] / optimum, times[2] / optimum
    done = call("score", game.folder)
    assert done.returncode == 0, done.stderr
    cells = next(line for line in done.stdout.splitlines() if "table-1" in line).strip("|").split("|")
    table, played, _, counts, _, _ = (cell.strip() for cell in cells)
    assert table == f"{TABLE} (table-1)"
    assert played.split() == [f"{ratio:.3f}" for ratio in (after_1, after_3, after_3, after_3, after_3)]
    assert counts == "3, 2"


@pytest.mark.parametrize(("words", "said"), [("score", "prepare"), ("prepare", "card.yaml")])
def test_a_folder_that_is_none_is_refused_in_one_line(tmp_path, words, said):
    more = ["--out", tmp_path / "out"] if words == "prepare" else []
    done = call(words, tmp_path / "none", *more)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line
    assert not (tmp_path / "out").exists()
