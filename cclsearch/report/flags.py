"""A configuration as options of its framework, as the run script renders them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.redact import public_environment, redact
from cclsearch.core.text import plain
from cclsearch.launch.contract import CONFIG_FILE, TrialInput, trial_environment
from cclsearch.run.spec import RunSpec
from cclsearch.space.framework import Framework, load_framework

SHOW_FLAGS = "--show-flags"
"""Given this option, a run script prints one framework option per line and exits."""


def describe_flags(spec: RunSpec, payload: TrialInput) -> str:
    """One line: the framework's options for a trial, or its knobs and why the options are unknown."""
    try:
        framework = load_framework(spec.framework)
    except UserError:  # a recording may name a framework that has no file
        return f"knobs: {payload.config} (options of {spec.framework} are unknown: there is no such framework file)"
    flags = _framework_flags(framework, payload) if framework.script else []
    if flags:
        return f"options of {framework.name}: {' '.join(flags)}"
    why = (
        "there is no run script" if framework.script is None else f"the run script {framework.script} prints no options"
    )
    return f"knobs: {payload.config} (options of {framework.name} are unknown: {why})"


def _framework_flags(framework: Framework, payload: TrialInput) -> list[str]:
    command = [sys.executable, str(framework.script_path), SHOW_FLAGS]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / CONFIG_FILE).write_text(payload.model_dump_json(), encoding="utf-8")
        environment = {**public_environment(), **trial_environment(folder, payload)}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return []
    lines = redact(done.stdout.decode("utf-8", "replace")).split("\n")[:-1]
    return [plain(line) for line in lines] if done.returncode == 0 else []
