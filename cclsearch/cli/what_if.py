"""`ccl-search what-if`: the step time with other links, another algorithm or compressed collectives."""

from __future__ import annotations

import argparse
from pathlib import Path

import orjson

from cclsearch.card.load import inspect_card, require_card
from cclsearch.core.text import one_line, plain
from cclsearch.trace.export.chakra import describe_unsized_collectives, export_chakra
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.read import open_trace
from cclsearch.trace.whatif.answer import answer_as_data, describe_answer, merge_notes, read_compression, read_factor
from cclsearch.trace.whatif.projection import Replay, Scenario, prepare_replay


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 if there is a result, 1 if the trace does not allow one."""
    scenario = _read_scenario(args)
    card = require_card(inspect_card(args.card)) if args.card else None
    trace = open_trace(Path(args.trace), card=card, workers=args.workers)
    if not trace.ranks:
        return print_not_available(
            str(trace.trace_set.reason or "no_trace_files"), trace.trace_set.message, as_json=args.json
        )
    written = export_chakra(trace, Path(args.chakra)) if args.chakra else []
    notes = describe_unsized_collectives(trace) if args.chakra else []
    try:
        replay = prepare_replay(trace, args.ranks_per_domain)
    except NotAvailable as error:
        return print_not_available(str(error.reason), error.detail, as_json=args.json)
    _print_answer(replay, scenario, written, notes, args)
    return 0


def print_not_available(reason: str, message: str, *, as_json: bool) -> int:
    """Print why a trace does not give the result; returns the exit code."""
    answer = {"status": "not_available", "reason": reason, "message": one_line(message)}
    print(orjson.dumps(answer).decode() if as_json else f"not available: {one_line(message) or reason}")
    return 1


def _read_scenario(args: argparse.Namespace) -> Scenario:
    ratio, cost = read_compression(args.compress)
    return Scenario(
        scale_up_bw=read_factor("--scale-up-bw", args.scale_up_bw),
        scale_out_bw=read_factor("--scale-out-bw", args.scale_out_bw),
        scale_up_domain=args.scale_up_domain,
        algorithm=args.algorithm,
        compress_ratio=ratio,
        compress_cost_s_per_byte=cost,
        compute=read_factor("--compute", args.compute),
    )


def _print_answer(
    replay: Replay, scenario: Scenario, written: list[Path], notes: list[str], args: argparse.Namespace
) -> None:
    """Print the answer; `written` are the Chakra traces, `notes` say what they do not contain."""
    answer = replay.time(scenario) if scenario != Scenario() else None
    utilities = replay.utilities()
    if args.json:
        shown = {
            "step_time_s": replay.step_time_s,
            "is_step": replay.is_step,
            "scenario": answer_as_data(answer),
            "utility": {name: answer_as_data(doubled) for name, doubled in utilities.items()},
            "chakra": [str(path) for path in written],
            "chakra_notes": notes,
        }
        print(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
        return
    lines = describe_answer(replay, answer, utilities)
    asked = {"this scenario": answer} if answer is not None else utilities
    lines += [f"note: {note}" for note in merge_notes(asked, notes)]
    lines += [f"wrote {path}" for path in written]
    print(plain("\n".join(lines)))
