"""Runs an untrusted program: in an interpreter without files, network or environment, in a process without our
environment, under limits on time, memory and output."""

from __future__ import annotations

import builtins
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.text import one_line, plain
from cclsearch.core.values import Model

CHILD = Path(__file__).with_name("sandbox_child.py")


class SandboxLimits(Model):
    """The limits of one run of a program."""

    time_s: float = 3.0
    memory_bytes: int = 128 * 2**20
    output_bytes: int = 64_000
    """Bytes of its printed output (which is dropped) and, separately, of its return value."""
    recursion: int = 300
    program_bytes: int = 60_000

    @property
    def wall_s(self) -> float:
        """After this time, start-up on a loaded machine included, the process is killed."""
        return 4 * self.time_s + 30.0


class SandboxError(Exception):
    """The program returned no dictionary; the message gives the reason, in one bounded line or traceback."""


def run_policy(
    program: str,
    workload: dict[str, Any],
    environment: dict[str, Any],
    history: list[dict[str, Any]] | None = None,
    *,
    limits: SandboxLimits | None = None,
) -> dict[str, Any]:
    """The result of `generate_config(workload, environment)` of that program: a flat dictionary of plain values.

    Raises SandboxError if the result is anything else, or if a limit was exceeded.
    """
    inputs = {"workload": workload, "environment": environment, "history": history or []}
    return _check_result(_run(program, "generate_config(workload, environment)", inputs, limits or SandboxLimits()))


# The whole space is one run: its rows are far larger than what a policy reads and returns.
CORRECTION_LIMITS = SandboxLimits(time_s=10.0, memory_bytes=2**29, output_bytes=500_000)
"""Limits of a program that corrects the prediction of a whole space."""


def run_correction(
    program: str, rows: Sequence[tuple[dict[str, Any], dict[str, dict[str, float]]]], card: dict[str, Any]
) -> NDArray[np.float64]:
    """(n, 2) time and memory of n rows (configuration, parts) by `correct(config, parts, card) -> parts` of a program.

    `parts` has the dictionaries `time` and `memory`, part -> its share. Raises SandboxError if the program returns
    anything else, or a total that is not a positive number.
    """
    text = _run(program, "correct(config, parts, card)", {"rows": rows, "card": card}, CORRECTION_LIMITS)
    try:
        totals = np.array(json.loads(str(text)), dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        totals = np.zeros(0)
    if totals.shape != (len(rows), 2) or not np.all(np.isfinite(totals)) or np.any(totals <= 0):
        raise SandboxError("correct must return parts, whose times and whose memory each add up to a number above 0")
    return totals


def _run(program: str, signature: str, inputs: dict[str, Any], limits: SandboxLimits) -> object:
    """Return what the function of the program returns, as JSON text; raises SandboxError."""
    if "\0" in program or len(program.encode("utf-8", "replace")) > limits.program_bytes:
        raise SandboxError(f"a program must be text of at most {limits.program_bytes:,} bytes")
    text = program.encode("utf-8", "replace").decode()
    task = {"program": text, "signature": signature, "inputs": inputs, "limits": limits.model_dump()}
    answer = _run_child(json.dumps(task), limits)
    if "error" in answer:
        raise SandboxError(_message(str(answer["error"])))
    return answer.get("result")


def _run_child(task: str, limits: SandboxLimits) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-I", str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.path.dirname(sys.executable), "LANG": "C.UTF-8"},
        cwd="/",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(task.encode(), timeout=limits.wall_s)
    except subprocess.TimeoutExpired:
        raise SandboxError("the program exceeded the time limit and was killed") from None
    finally:
        _end_group(process)
    try:
        answer = json.loads(output[: limits.output_bytes * 8])
    except (ValueError, RecursionError):
        raise SandboxError("the program crashed its sandbox process (memory or recursion limit)") from None
    return answer if isinstance(answer, dict) else {"error": "the sandbox returned no answer"}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole process group: the interpreter's process must not outlive its parent."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _check_result(text: object) -> dict[str, Any]:
    try:
        result = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict):
        raise SandboxError("generate_config must return a dict of knob -> value")
    if len(result) > 200:
        raise SandboxError(f"generate_config returned {len(result)} entries; a configuration has far fewer")
    given = {key: value for key, value in result.items() if value is not None}
    for key, value in given.items():
        is_plain = isinstance(value, str | int | float | bool) and not (
            isinstance(value, float) and not math.isfinite(value)
        )
        if not is_plain:
            raise SandboxError(f"the value of {one_line(key, 40)!r} must be a plain number, string or boolean")
    if result and not given:
        raise SandboxError("every value that generate_config returned is None")
    return given


def _message(error: str) -> str:
    lines = plain(error).strip().splitlines()
    short = [line[:300] for line in (lines if len(lines) <= 8 else [*lines[:2], "...", *lines[-5:]])]
    text = "\n".join(short)
    return text[:1200] + _hint(text)


SUBSET = (
    "\n(the sandbox runs a subset of Python: no yield, del, inheritance, properties, or operators of own classes; it "
    "has math, json, re, itertools, functools, collections (defaultdict, Counter, deque, namedtuple), dataclasses "
    "(dataclass, field), typing, random, copy, bisect, decimal, datetime: write this another way)"
)
LISTS = "\n(in the sandbox a generator expression, map, zip or filter returns a list: write next(iter(...)))"
UNSUPPORTED = (
    "does not yet support",
    "NotImplementedError",
    "ModuleNotFoundError",
    "ImportError: cannot import name",
    "is not supported in this environment",
)


def _hint(text: str) -> str:
    """A hint if the program uses Python that the sandbox does not support; empty if the mistake is in the program."""
    if "'list' object is not an iterator" in text:
        return LISTS
    unknown = re.search(r"NameError: name '(\w+)' is not defined", text)
    is_built_in = unknown is not None and hasattr(builtins, unknown.group(1))
    compared = re.search(r"not supported between instances of '(\w+)' and '\1'", text)
    is_own_class = compared is not None and not hasattr(builtins, compared.group(1))
    return SUBSET if is_built_in or is_own_class or any(message in text for message in UNSUPPORTED) else ""
