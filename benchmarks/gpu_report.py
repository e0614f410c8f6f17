"""The checks and figures that `gpu.py` collects, as a table and as JSON."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One comparison. `ok` is None if this machine cannot make it."""

    section: str
    what: str
    expected: str
    found: str
    ok: bool | None

    @property
    def verdict(self) -> str:
        return {True: "ok", False: "FAILED", None: "not here"}[self.ok]


@dataclass
class Report:
    """Everything that one run found, in order."""

    small: bool
    table_s: float
    """Seconds for measuring configurations: on a slow device the rest of the space is left out."""
    ends_s: float
    """Value of `time.monotonic()` at which no further section starts."""
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    section_name: str = ""

    def check(self, what: str, expected: str, found: str, ok: bool) -> None:
        """Record a comparison that this machine made."""
        self._add(what, expected, found, bool(ok))

    def check_close(self, what: str, expected: float, found: float | None, tolerance: float, unit: str = "") -> None:
        """Record whether a number is within this relative tolerance of an independently found one."""
        ok = found is not None and abs(found - expected) <= tolerance * abs(expected)
        shown = f"{found:.5g} {unit}".strip() if found is not None else "none"
        self._add(what, f"{expected:.5g} {unit}".strip() + f" within {tolerance:.1%}", shown, ok)

    def skip(self, what: str, why: str) -> None:
        """Record a comparison that this machine cannot make."""
        self._add(what, "", why, None)

    def note(self, text: str) -> None:
        """Record a finding that is neither a figure nor a comparison."""
        self.notes.append(f"{self.section_name}: {text}")
        print(f"  note: {text}", flush=True)

    def run_part(self, name: str, run: Callable[[], object]) -> None:
        """Run one part: an exception in it is a failed check, and the parts after it still run."""
        self.section_name, started = name, time.monotonic()
        print(f"== {name}", flush=True)
        try:
            if started > self.ends_s:
                self.skip("this part", "the time was used up")
            else:
                run()
        except Exception as error:
            traceback.print_exc()
            self._add("this part runs", "no exception", f"{type(error).__name__}: {str(error)[:300]}", False)
        self.seconds[name] = time.monotonic() - started

    @property
    def num_failed(self) -> int:
        return sum(check.ok is False for check in self.checks)

    def _add(self, what: str, expected: str, found: str, ok: bool | None) -> None:
        check = Check(self.section_name, what, expected, " ".join(found.split()), ok)
        self.checks.append(check)
        print(f"  {check.verdict}: {what}: {check.found}" + (f" (expected {expected})" if expected else ""), flush=True)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        checks = [{**vars(check), "verdict": check.verdict} for check in self.checks]
        parts = {"figures": self.figures, "checks": checks, "notes": self.notes, "seconds": self.seconds}
        return json.dumps({"schema_version": 1, "small": self.small, **parts}, indent=1, default=str)

    def to_markdown(self) -> str:
        """Return the tables that `gpu.md` keeps."""
        lines = ["| check | expected | found | |", "| --- | --- | --- | --- |"]
        for check in self.checks:
            cells = (f"{check.section}: {check.what}", check.expected, check.found, check.verdict)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines += ["", "| figure | value |", "| --- | --- |"]
        lines += [f"| {name} | {_show(value)} |" for name, value in self.figures.items()]
        lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_show, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show(one)}" for name, one in value.items())
    return str(value).replace("|", "\\|")
