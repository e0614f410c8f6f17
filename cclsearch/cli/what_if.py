"""`ccl-search what-if`: the step time with other links, another algorithm or compressed collectives."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import orjson

from cclsearch.card.load import inspect_card, require_card
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line, plain
from cclsearch.trace.export.chakra import describe_unsized_collectives, export_chakra
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.open import open_trace
from cclsearch.trace.text_report import format_table, format_value
from cclsearch.trace.whatif.cost_model import Scenario
from cclsearch.trace.whatif.projection import Replay, WhatIf, prepare_replay


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 if there is a result, 1 if the trace does not allow one."""
    scenario = _read_scenario(args)
    card = require_card(inspect_card(args.card)) if args.card else None
    trace = open_trace(Path(args.trace), card=card, workers=args.workers)
    if not trace.ranks:
        return _print_failure(str(trace.trace_set.reason or "no_trace_files"), trace.trace_set.message, args)
    written = export_chakra(trace, Path(args.chakra)) if args.chakra else []
    notes = describe_unsized_collectives(trace) if args.chakra else []
    try:
        replay = prepare_replay(trace, args.ranks_per_domain)
    except NotAvailable as error:
        return _print_failure(str(error.reason), error.detail, args)
    _print_answer(replay, scenario, written, notes, args)
    return 0


def _print_failure(reason: str, message: str, args: argparse.Namespace) -> int:
    if args.json:
        print(orjson.dumps({"status": "not_available", "reason": reason, "message": one_line(message)}).decode())
    else:
        print(f"not available: {one_line(message) or reason}")
    return 1


def _read_scenario(args: argparse.Namespace) -> Scenario:
    ratio, cost = _read_compression(args.compress)
    return Scenario(
        scale_up_bw=_read_factor("--scale-up-bw", args.scale_up_bw),
        scale_out_bw=_read_factor("--scale-out-bw", args.scale_out_bw),
        scale_up_domain=args.scale_up_domain,
        algorithm=args.algorithm,
        compress_ratio=ratio,
        compress_cost_s_per_byte=cost,
        compute=_read_factor("--compute", args.compute),
    )


def _read_factor(option: str, text: str | None) -> float:
    if text is None:
        return 1.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)x?", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise UserError(f"{option} must be a factor above 0 such as 2x or 0.5x, not {text!r}")
    return float(match[1])


def _read_compression(text: str | None) -> tuple[float, float]:
    """Return the ratio, and the coding cost in s/byte (given in us per MB of 1e6 bytes)."""
    if text is None:
        return 1.0, 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x?(?::(\d+(?:\.\d+)?))?", text.strip().lower())
    if not match or float(match[1]) < 1:
        raise UserError(f"--compress must be RATIO[:US_PER_MB] with a ratio of at least 1, such as 4:30, not {text!r}")
    return float(match[1]), float(match[2] or 0) * 1e-6 / 1e6


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
            "scenario": _as_data(answer),
            "utility": {name: _as_data(doubled) for name, doubled in utilities.items()},
            "chakra": [str(path) for path in written],
            "chakra_notes": notes,
        }
        print(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
        return
    lines = _text_lines(replay, answer, utilities)
    asked = {"this scenario": answer} if answer is not None else utilities
    lines += [f"note: {note}" for note in _merge_notes(asked, notes)]
    lines += [f"wrote {path}" for path in written]
    print(plain("\n".join(lines)))


def _merge_notes(answers: Mapping[str, WhatIf], notes: list[str]) -> list[str]:
    """Return the notes once each; a note of some answers only begins with their names."""
    by_note: dict[str, list[str]] = {}
    for name, answer in answers.items():
        for note in answer.notes:
            by_note.setdefault(note, []).append(name)
    merged = [note if len(of) == len(answers) else f"{', '.join(of)}: {note}" for note, of in by_note.items()]
    return list(dict.fromkeys((*merged, *notes)))


def _as_data(answer: WhatIf | None) -> object:
    if answer is None:
        return None
    return {**answer.model_dump(mode="json"), "gain_low": answer.gain_low, "gain_high": answer.gain_high}


def _text_lines(replay: Replay, answer: WhatIf | None, utilities: dict[str, WhatIf]) -> list[str]:
    def between(found: WhatIf) -> tuple[str, str]:
        low, high = format_value(found.low_s, "s"), format_value(found.high_s, "s")
        gains = (f"{100 * found.gain_low:.1f} %", f"{100 * found.gain_high:.1f} %")
        return low if low == high else f"{low} to {high}", gains[0] if low == high else f"{gains[0]} to {gains[1]}"

    measured = format_value(replay.step_time_s, "s")
    lines = [f"measured step: {measured} (trace_step_time of `ccl-search score`)"]
    if not replay.is_step:
        lines = [f"recorded window (no step markers): {measured}"]
    if answer is not None:
        step, gain = between(answer)
        lines.append(
            f"{replay.what} in this scenario: {step}, {gain} of the measured {replay.what} saved"
            " (simulated by replaying the trace)"
        )
    rows = [(name, *between(doubled)) for name, doubled in utilities.items()]
    lines += [
        "",
        f"{replay.what} with one resource twice as fast (simulated):",
        format_table(("resource", replay.what, f"saved (share of the measured {replay.what})"), rows),
    ]
    return lines
