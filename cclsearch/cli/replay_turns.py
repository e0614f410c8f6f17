"""`ccl-search replay-turns`: replays the LLM's decisions from the turn records on disk."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line, plain
from cclsearch.propose.agent.memory.replay import replay_turns
from cclsearch.propose.agent.memory.turn_records import read_turns
from cclsearch.run.catalog import find_run


def run(args: argparse.Namespace) -> int:
    folder = find_run(args.run, args.runs)
    if args.prompt is not None:
        return print_prompt(folder, args.prompt)
    turns = replay_turns(folder)
    for turn in turns:
        if args.json:
            facts = {"turn": turn.turn, "decision": turn.decision, "again": turn.again}
            print(json.dumps({**facts, "same": turn.is_same, "same_prompt": turn.same_prompt}))
        else:
            mark = "same" if turn.is_same else f"DIFFERS, replayed: {one_line(turn.again)}"
            prompt = "" if turn.same_prompt else " (the prompt differs)"
            print(f"turn {turn.turn}: {one_line(turn.decision)} [{mark}]{prompt}")
    different = sum(not turn.is_same for turn in turns)
    if not args.json:
        print(f"{len(turns)} turns replayed without a provider, {different} with another decision")
    return 1 if different else 0


def print_prompt(folder: Path, number: int) -> int:
    """Print the first request of a turn to the model; later ones add its look-ups and their answers."""
    turns = {record.turn: record for record in read_turns(folder)}
    if number not in turns:
        raise UserError(f"there is no turn {number}: {folder.name} has {', '.join(map(str, turns)) or 'none'}")
    print(plain(turns[number].system))
    print(f"\n{'=' * 20}\n")
    print(plain(turns[number].user))
    return 0
