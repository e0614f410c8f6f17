"""The scenario of `ccl-search what-if` as a user writes it, and its answer as text and data."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cclsearch.core.errors import UserError
from cclsearch.core.text import format_table, format_value
from cclsearch.trace.whatif.projection import Replay, WhatIf


def read_factor(option: str, text: str | None) -> float:
    """Return the factor that an option names, such as 2 for `2x`; 1 without it."""
    if text is None:
        return 1.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)x?", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise UserError(f"{option} must be a factor above 0 such as 2x or 0.5x, not {text!r}")
    return float(match[1])


def read_compression(text: str | None) -> tuple[float, float]:
    """Return the ratio, and the coding cost in s/byte (given in us per MB of 1e6 bytes)."""
    if text is None:
        return 1.0, 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x?(?::(\d+(?:\.\d+)?))?", text.strip().lower())
    if not match or float(match[1]) < 1:
        raise UserError(f"--compress must be RATIO[:US_PER_MB] with a ratio of at least 1, such as 4:30, not {text!r}")
    return float(match[1]), float(match[2] or 0) * 1e-6 / 1e6


def merge_notes(answers: Mapping[str, WhatIf], notes: list[str]) -> list[str]:
    """Return the notes once each; a note of some answers only begins with their names."""
    by_note: dict[str, list[str]] = {}
    for name, answer in answers.items():
        for note in answer.notes:
            by_note.setdefault(note, []).append(name)
    merged = [note if len(of) == len(answers) else f"{', '.join(of)}: {note}" for note, of in by_note.items()]
    return list(dict.fromkeys((*merged, *notes)))


def answer_as_data(answer: WhatIf | None) -> object:
    """Return an answer as data for JSON; None without one."""
    if answer is None:
        return None
    return {**answer.model_dump(mode="json"), "gain_low": answer.gain_low, "gain_high": answer.gain_high}


def describe_answer(replay: Replay, answer: WhatIf | None, utilities: dict[str, WhatIf]) -> list[str]:
    """Return the lines of an answer: the measured step, the scenario's, and the utility of each resource."""

    def between(found: WhatIf) -> tuple[str, str]:
        low, high = format_value(found.low_s, "s"), format_value(found.high_s, "s")
        gains = (f"{100 * found.gain_low:.1f} %", f"{100 * found.gain_high:.1f} %")
        return low if low == high else f"{low} to {high}", gains[0] if low == high else f"{gains[0]} to {gains[1]}"

    measured = format_value(replay.step_time_s, "s")
    lines = [f"measured step: {measured} (trace_step_time of `ccl-search score`)"]
    if not replay.is_step:
        lines = [f"recorded window ({replay.trace.unmarked}): {measured}"]
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
