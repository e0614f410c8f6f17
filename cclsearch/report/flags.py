"""A configuration in the framework's own words, as its run script renders them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from cclsearch.launch.contract import CONFIG_FILE, TrialInput, trial_environment
from cclsearch.redact import public_environment
from cclsearch.space.framework import load_framework
from cclsearch.spec import RunSpec

SHOW_FLAGS = "--show-flags"
"""Given this, a run script prints one option a line and exits."""


def framework_flags(spec: RunSpec, payload: TrialInput) -> list[str]:
    """Options of the framework for one trial; where it has no run script that tells, `--knob value` in our words."""
    framework = load_framework(spec.framework)
    if framework.script is not None:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / CONFIG_FILE).write_text(payload.model_dump_json(), encoding="utf-8")
            told = _ask_script(framework.script_path, {**public_environment(), **trial_environment(folder, payload)})
        if told:
            return told
    return [f"--{knob.replace('_', '-')} {value}" for knob, value in payload.config.items()]


def _ask_script(script: Path, environment: dict[str, str]) -> list[str]:
    command = [sys.executable, str(script), SHOW_FLAGS]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []
