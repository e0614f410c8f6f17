"""Lets a capable LLM, or a person, play searches over recorded tables whose origin it does not know.

    python benchmarks/blind.py prepare TABLE... --out FOLDER       copies without names: FOLDER/tables/table-1, ...
    python benchmarks/blind.py play FOLDER/tables/table-1 --games FOLDER/games/table-1     one search, until it ends
    python benchmarks/blind.py next FOLDER/games/table-1           the request that waits for an answer
    python benchmarks/blind.py answer FOLDER/games/table-1 FILE    gives it the answer: {"calls": [...]}
    python benchmarks/blind.py score FOLDER                        best/optimum beside that of the surrogate alone

`play` runs `ccl-search run --recording TABLE --llm URL` against the local provider of `tests/llm/server.py`, so that a
player sees what a provider would. FOLDER/key.json says which table is which; a player must not read it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import difflib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
# The rest of the engine is imported where it is used: a player calls `next` and `answer` some fifty times.
from cclsearch.core.errors import UserError  # noqa: E402

if TYPE_CHECKING:
    from cclsearch.recording.load import Recording

KEY_FILE = "key.json"
TABLES = "tables"
REQUESTS = "requests"
RUNS = "runs"
OVER = "over.json"
"""What `play` writes when the search has ended: its exit status."""
SHOWN = "shown.json"
"""System prompt and tools as `next` printed them last."""
NAMING = ("description", "source", "licence")
"""Fields of a card that name where its table comes from."""
MILESTONES = (1, 3, 5, 10, 15)
NEAR = 0.001
"""Relative difference from the optimum that no run can show."""
ANSWER_S = 3600
POLL_S = 0.2
BUDGET = 15


def prepare(tables: Sequence[Path], out: Path) -> None:
    """Copy these tables under neutral names; the key says which is which."""
    import yaml

    from cclsearch.recording.load import load_recording

    if (out / KEY_FILE).exists():
        raise UserError(f"{out} was prepared before: name a new folder")
    for table in tables:
        load_recording(table)
    key = {f"table-{number}": table.resolve().name for number, table in enumerate(tables, 1)}
    for name, table in zip(key, tables, strict=True):
        folder = out / TABLES / name
        folder.mkdir(parents=True)
        card = yaml.safe_load((table / "card.yaml").read_text(encoding="utf-8"))
        (folder / "card.yaml").write_text(yaml.safe_dump(hide_names(card), sort_keys=False), encoding="utf-8")
        copy_table(table / "trials.csv", folder / "trials.csv")
        load_recording(folder)
    (out / KEY_FILE).write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8")
    print(f"{len(key)} tables in {out / TABLES}")


def hide_names(card: dict[str, Any]) -> dict[str, Any]:
    """A card without what names its model or its origin.

    The framework stays, because the closed form depends on it: prompts over recordings never name it.
    """
    kept = {name: value for name, value in card.items() if name not in NAMING}
    model = {**kept["workload"]["model"], "model_family": "transformer"}
    return {**kept, "workload": {**kept["workload"], "model": model}}


def copy_table(source: Path, target: Path) -> None:
    """Copy a table without the columns of words right of `status`, which describe rows in the source's own terms."""
    with source.open(encoding="utf-8", newline="") as file:
        header, *rows = list(csv.reader(file))
    status = header.index("status")
    kept = [i for i in range(len(header)) if i <= status or all(is_number(row[i]) for row in rows)]
    with target.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([[row[i] for i in kept] for row in (header, *rows)])


def is_number(cell: str) -> bool:
    """Whether a cell is empty or a number."""
    with contextlib.suppress(ValueError):
        return not cell or math.isfinite(float(cell))
    return False


def play_game(table: Path, game: Path, budget: int) -> int:
    """Run one search whose LLM is the player; returns its exit status, and ends it if this process is ended."""
    from llm.server import MODEL, answer_from_files, answer_once, check_first, serve

    if game.exists():
        raise UserError(f"{game} exists: a game is played once")
    game.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    code = 1
    try:
        with serve(check_first(answer_once(answer_from_files(game / REQUESTS, wait_s=ANSWER_S)))) as server:
            code = run_search(table, game, budget, f"{server.url}/v1#{MODEL}")
    finally:
        (game / OVER).write_text(json.dumps({"exit": code}) + "\n", encoding="utf-8")
    return code


def run_search(table: Path, game: Path, budget: int, llm: str) -> int:
    """Run the search in a process of its own and return its exit status."""
    from llm.server import KEY

    command = [sys.executable, "-m", "cclsearch", "run", "--recording", str(table), "--budget", str(budget)]
    command += ["--seed", "0", "--llm", llm, "--runs", str(game / RUNS)]
    own = {"CCL_SEARCH_LLM_API_KEY": KEY, "CCL_SEARCH_LLM_TIMEOUT_S": str(ANSWER_S), "PYTHONPATH": str(ROOT)}
    with (game / "search.log").open("w", encoding="utf-8") as log:
        search = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **own}, cwd=game)
        try:
            return search.wait()
        finally:
            if search.poll() is None:
                search.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    search.wait(20)
                search.kill()


def find_waiting(game: Path) -> Path | None:
    """The request without an answer; None if none waits."""
    requests = sorted((game / REQUESTS).glob("*.request.json"))
    return requests[-1] if requests and not find_answer(requests[-1]).exists() else None


def find_answer(request: Path) -> Path:
    """The file of the answer to that request."""
    return request.with_name(request.name.replace("request", "answer"))


def show_next(game: Path, wait_s: float) -> None:
    """Print the request that waits; of system prompt and tools only what is new to the player."""
    deadline = time.monotonic() + wait_s
    while (found := find_waiting(game)) is None and not (game / OVER).exists():
        if time.monotonic() > deadline:
            print("no request yet: call `next` again")
            return
        time.sleep(POLL_S)
    if found is None or (game / OVER).exists():
        print("the game is over")
        return
    request = json.loads(found.read_text(encoding="utf-8"))
    shown = json.loads((game / SHOWN).read_text(encoding="utf-8")) if (game / SHOWN).exists() else {}
    tools = {tool["name"]: format_tool(tool) for tool in request["tools"]}
    print(f"=== request {found.name.split('.')[0]}")
    print_changes(shown.get("system", ""), request["system"], shown.get("tools", {}), tools)
    print_messages(request["messages"])
    (game / SHOWN).write_text(json.dumps({"system": request["system"], "tools": tools}), encoding="utf-8")


def format_tool(tool: dict[str, Any]) -> str:
    """A tool in two lines."""
    return f"{tool['name']}: {tool['description']}\n  {json.dumps(tool['parameters'], ensure_ascii=False)}"


def print_changes(old_system: str, system: str, old_tools: dict[str, str], tools: dict[str, str]) -> None:
    """Print system prompt and tools, or what changed in them."""
    if not old_system:
        print(f"=== system prompt\n{system}")
    elif old_system != system:
        lines = difflib.unified_diff(old_system.splitlines(), system.splitlines(), lineterm="", n=0)
        print("=== changed in the system prompt", *[line for line in lines if line[:2] in ("+ ", "- ")], sep="\n")
    new = [text for name, text in tools.items() if old_tools.get(name) != text]
    gone = [name for name in old_tools if name not in tools]
    if new or gone:
        print("=== tools" + (", changed ones only" if old_tools else ""), *new, sep="\n")
        print(*(f"{name}: not available now" for name in gone), sep="\n", end="\n" if gone else "")


def print_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Print the first message of a turn, or the last one of a turn that goes on."""
    print(
        "=== a new turn"
        if "trials seen; budget left" in messages[-1]["text"]
        else "=== the same turn: results of your calls"
    )
    for result in messages[-1]["results"]:
        print(f"--- result of {result['id']}{' (refused)' if result['is_error'] else ''}\n{result['text']}")
    print(messages[-1]["text"])


def give_answer(game: Path, file: Path) -> None:
    """Give the waiting request this answer; UserError if it is not one."""
    request = find_waiting(game)
    if request is None:
        raise UserError("no request waits for an answer: call `next`")
    try:
        answer = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None
    calls = answer.get("calls") if isinstance(answer, dict) else None
    is_fine = isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)
        for call in calls
    )
    if not is_fine:
        raise UserError('an answer is {"text": "...", "calls": [{"name": TOOL, "arguments": {...}}, ...]}')
    part = request.with_name(f"{request.name}.part")
    part.write_text(json.dumps(answer, ensure_ascii=False), encoding="utf-8")
    part.rename(find_answer(request))
    print("given")


def score(folder: Path) -> None:
    """Print, as Markdown, best/optimum with the LLM and by the surrogate alone, table by table."""
    if not (folder / KEY_FILE).exists():
        raise UserError(f"{folder} has no {KEY_FILE}: `prepare` writes it")
    from agent import FALLBACK, play

    from cclsearch.recording.load import load_recording

    key = json.loads((folder / KEY_FILE).read_text(encoding="utf-8"))
    print("| table | with the LLM | optimum (within 0.1 %) at trial | trials, of the LLM | alone | optimum at trial |")
    print("|---|---|---|---|---|---|")
    logs: list[tuple[Sequence[float], Sequence[float]]] = []
    for name, table in key.items():
        recording = load_recording(folder / TABLES / name)
        alone = play((str(folder / TABLES / name), FALLBACK, 0)).log_ratio
        game = find_game(folder / "games" / name, recording)
        if game is None:
            print(f"| {table} ({name}) | not played | | | {format_curve(alone)} | {format_found(alone)} |")
            continue
        played, who = game
        logs.append((played, alone))
        chosen = f"{len(who)}, {who.count('llm')}"
        cells = [f"{table} ({name})", format_curve(played), format_found(played), chosen]
        print(f"| {' | '.join([*cells, format_curve(alone), format_found(alone)])} |")
    if logs:
        means = [[sum(pair[i][k] for pair in logs) / len(logs) for k in range(BUDGET)] for i in (0, 1)]
        print(f"| geometric mean of {len(logs)} | {format_curve(means[0])} | | | {format_curve(means[1])} | |")


def find_game(game: Path, recording: Recording) -> tuple[tuple[float, ...], list[str]] | None:
    """Log of best over optimum after each trial of a game, and who proposed it; None if nothing ran."""
    from agent import curve, observe

    from cclsearch.record.ledger import fold_ledger

    ledger = next((game / RUNS).glob("*/ledger.jsonl"), None)
    if ledger is None:
        return None
    table = fold_ledger(ledger).trials
    trials = [table[number] for number, brief in sorted(table.briefs.items()) if brief.is_search and brief.is_finished]
    rows = [recording.space.row(trial.config) for trial in trials]
    seen = [observe(recording, number, row) for number, row in enumerate(rows, 1) if row is not None]
    return curve(recording, seen), [trial.proposer for trial in trials]


def format_curve(logs: Sequence[float]) -> str:
    """Best/optimum at the milestones."""
    return " ".join(f"{math.exp(logs[k - 1]):.3f}" for k in MILESTONES)


def format_found(logs: Sequence[float]) -> str:
    """The trial that reached the optimum, and the one that came within `NEAR` of it, if that was earlier."""
    exact = next((trial for trial, log in enumerate(logs, 1) if log < 1e-9), None)
    near = next((trial for trial, log in enumerate(logs, 1) if log <= math.log1p(NEAR)), None)
    return f"{exact or 'not reached'}{f' ({near})' if near != exact else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Searches with a player who does not know the tables' origin.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("tables", nargs="+", type=Path)
    one.add_argument("--out", type=Path, required=True)
    one = commands.add_parser("play")
    one.add_argument("table", type=Path)
    one.add_argument("--games", type=Path, required=True, metavar="GAME", help="folder of this game, a new one")
    one.add_argument("--budget", type=int, default=BUDGET)
    one = commands.add_parser("next")
    one.add_argument("game", type=Path)
    one.add_argument("--wait", type=float, default=60.0, metavar="SECONDS")
    one = commands.add_parser("answer")
    one.add_argument("game", type=Path)
    one.add_argument("file", type=Path)
    one = commands.add_parser("score")
    one.add_argument("folder", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        if args.command == "prepare":
            prepare(args.tables, args.out.resolve())
        elif args.command == "play":
            sys.exit(play_game(args.table.resolve(), args.games.resolve(), args.budget))
        elif args.command == "next":
            show_next(args.game, args.wait)
        elif args.command == "answer":
            give_answer(args.game, args.file)
        else:
            score(args.folder)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
