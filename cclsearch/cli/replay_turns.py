"""`ccl-search replay-turns`: replays the LLM's decisions from the turn records on disk."""

from __future__ import annotations

import argparse
import json

from cclsearch.core.text import one_line
from cclsearch.propose.agent.replay import replay_turns
from cclsearch.run.catalog import find_run


def run(args: argparse.Namespace) -> int:
    turns = replay_turns(find_run(args.run, args.runs))
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
