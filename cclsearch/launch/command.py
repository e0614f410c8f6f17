"""A command of the user's own as what measures trials: the knobs filled in, and its figures read from what it wrote.

Text of the user's is the command; values of knobs enter it as single shell words.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field

from cclsearch.core.errors import UserError
from cclsearch.core.numbers import parse_number
from cclsearch.core.processes import find_processes_by_variable, terminate_processes
from cclsearch.core.secrets.names import is_secret_name
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.values import Model, Value, format_knob_value
from cclsearch.launch.contract import STDERR_FILE, STDOUT_FILE
from cclsearch.space.knobs import canonical_name
from cclsearch.space.parse import HOLDER, TEMPLATE, fill_command

JSON = "json:"
TRIAL_DIR = "CCL_TRIAL_DIR"
"""Variable that names the trial's folder to the command, and by which its processes are found."""
MAX_COARSE_S = 2.0
"""Seconds by which the times of files may be too early."""
MAX_READ = 64 * 2**20
"""Bytes at the end of a log, or of a file, in which figures are looked for."""
MAX_FIND_S = 30
"""Seconds of matching: some expressions take years."""
_FIND = "import json, re, sys; print(json.dumps(re.findall(sys.argv[1], sys.stdin.buffer.read().decode())))"


class Command(Model):
    """How a command is started, and where its figures are."""

    text: str
    reads: dict[str, str] = {}
    """Metric -> regular expression with one group, or `json:FILE#KEY.KEY`."""
    folder: str
    """Where it starts."""
    template: str | None = None
    """File or folder that each trial gets a copy of, with the knobs filled in: `{template}` in the command."""
    timeout_s: float = Field(gt=0)

    def check(self, knobs: Mapping[str, int]) -> None:
        """Raise UserError for what no trial could start with: unused or unknown knobs, or figures that cannot be read.

        `knobs` has the number of choices of each.
        """
        places = [self.text, *map(_read_text, self._files())]
        used = {canonical_name(name) for text in places for name in HOLDER.findall(text)}
        if missing := [name for name, choices in knobs.items() if choices > 1 and name not in used]:
            where = f"the command or {self.template!r}" if self.template else "the command"
            raise UserError(f"--knob {missing[0]}: write {{{missing[0]}}} into {where}, or give it one value")
        for name in HOLDER.findall(self.text):
            if canonical_name(name) not in (*knobs, TEMPLATE) or (name == TEMPLATE and self.template is None):
                how = "give --template FILE" if name == TEMPLATE else f"give its values with --knob {name}=A,B"
                raise UserError(f"--command: {{{name}}} is not a knob{guess_name(name, knobs)}: {how}")
        for metric, pattern in self.reads.items():
            if pattern.startswith(JSON):
                continue
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise UserError(f"--read {metric}: {pattern!r} is not a regular expression: {error}") from None
            if groups != 1:
                raise UserError(f"--read {metric}: {pattern!r} must have one group (...), the number, not {groups}")

    def fill(self, config: Mapping[str, Value], folder: Path) -> str:
        """Return the line of shell with these knobs, each a single word; `folder` is the trial's."""
        return fill_command(self.text, config, str(folder / TEMPLATE / Path(self.template or "").name))

    def run(self, config: Mapping[str, Value], folder: Path, is_cancelled: Callable[[], bool]) -> int | None:
        """Run it with these knobs, its output into `folder`; returns its exit code, or None if it was cancelled.

        Raises TimeoutError after its time. Every process that it started ends with it.
        """
        if self.template is not None:
            self._fill_template({name: format_knob_value(value) for name, value in config.items()}, folder)
        passed = {name: value for name, value in os.environ.items() if not is_secret_name(name)}
        end_s = time.monotonic() + self.timeout_s
        with open(folder / STDOUT_FILE, "wb") as out, open(folder / STDERR_FILE, "wb") as errors:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self.fill(config, folder)],
                cwd=self.folder,
                env={**passed, TRIAL_DIR: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,  # Ctrl-C in the terminal reaches the search, which ends the command
            )
            try:
                while process.poll() is None:
                    if is_cancelled():
                        return None
                    if time.monotonic() > end_s:
                        raise TimeoutError
                    time.sleep(0.05)
                return process.returncode
            finally:
                terminate_processes(find_processes_by_variable(TRIAL_DIR, str(folder)))
                process.wait()

    def read_figures(self, folder: Path, since_s: float) -> dict[str, float]:
        """Return the metrics that the command printed or wrote since then; ValueError names what is missing."""
        printed = "\n".join(_read_end(folder / name) for name in (STDOUT_FILE, STDERR_FILE))
        figures = {}
        for metric, pattern in self.reads.items():
            try:
                figures[metric] = self._read(pattern, printed, folder, since_s)
            except (ValueError, LookupError, TypeError, RecursionError, OSError) as error:
                why = repr(error) if isinstance(error, LookupError | TypeError) else str(error)
                raise ValueError(f"--read {metric}: {pattern!r}: {one_line(why, 300)}") from None
        return figures

    def _read(self, pattern: str, printed: str, folder: Path, since_s: float) -> float:
        if pattern.startswith(JSON):
            name, _, keys = pattern.removeprefix(JSON).partition("#")
            own = folder / name  # as $CCL_TRIAL_DIR/NAME
            path = own if own.is_file() else Path(self.folder, name)
            if path.is_file() and path.stat().st_mtime < since_s - MAX_COARSE_S:
                raise ValueError(f"{path} is older than the trial, so another one wrote it")
            found: Any = json.loads(_read_end(path))
            for key in filter(None, keys.split(".")):
                found = found[int(key)] if isinstance(found, list) else found[key]
            return parse_number(str(found))  # a number, not `true`
        texts = _find_all(pattern, printed)
        if not texts:
            raise ValueError("nothing that it printed matches")
        numbers = [parse_number(text.replace(",", "")) for text in texts]
        return float(median(numbers[len(numbers) // 2 :]))  # the first half may be warm-up and compilation

    def _files(self) -> list[Path]:
        root = Path(self.folder, self.template or "")
        if self.template is None:
            return []
        if Path(self.folder).resolve().is_relative_to(root.resolve()):
            raise UserError(f"--template {self.template}: each trial would copy the current folder; name one inside it")
        if not root.exists():
            raise UserError(f"--template {self.template}: there is no such file or folder in {self.folder}")
        return [path for path in sorted(root.rglob("*")) if path.is_file()] if root.is_dir() else [root]

    def _fill_template(self, values: Mapping[str, str], folder: Path) -> None:
        """Write the template with the knobs filled in; other braces stay."""
        root = Path(self.folder, self.template or "")
        for path in self._files():
            copy = folder / TEMPLATE / path.relative_to(root.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            filled = HOLDER.sub(lambda found: values.get(canonical_name(found[1]), found[0]), _read_text(path))
            copy.write_bytes(filled.encode("utf-8", "surrogateescape"))


def _read_text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape")  # a folder may have files that are not texts


def _find_all(pattern: str, text: str) -> list[str]:
    """Return what the group of the pattern matched; in a process of its own, since `re` stops all threads."""
    call = [sys.executable, "-I", "-c", _FIND, pattern]
    try:
        return list(json.loads(subprocess.check_output(call, input=text.encode(), timeout=MAX_FIND_S)))
    except subprocess.SubprocessError:
        raise ValueError(f"matching failed, or took over {MAX_FIND_S} s: write a simpler expression") from None


def _read_end(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - MAX_READ, 0))
        return file.read().decode("utf-8", "replace")
