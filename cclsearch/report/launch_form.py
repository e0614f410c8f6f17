"""Launch of a configuration by hand, complete in the framework's own form, as its run script states it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.secrets.redact import public_environment, redact
from cclsearch.core.text import one_line, plain
from cclsearch.core.values import Config, Model
from cclsearch.launch.contract import CONFIG_FILE, TrialInput, trial_environment
from cclsearch.run.spec import RunSpec
from cclsearch.space.framework import FOLDER, SUFFIX, Framework, find_framework, load_framework
from cclsearch.space.parse import fill_command
from cclsearch.tasks.base import task_of

SHOW_LAUNCH = "--show-launch"
"""Given this option, a run script whose framework file has `shows_launch: true` prints a `LaunchForm` and exits."""
MAX_BYTES = 2**20
_TIMEOUT_S = 60
IN_COMMAND = frozenset({"CCL_MODEL_PATH", "CCL_MAX_MODEL_LEN", "CCL_SERVE_HOST", "CCL_SERVE_PORT"})
"""Variables of a profile that the command itself has."""
_WIDTH = 100

Word = Annotated[str, StringConstraints(max_length=20_000)]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]


class LaunchForm(Model):
    """One configuration as files, environment and command. All text is plain, without secrets."""

    title: str = Field(max_length=200)
    """Name of the framework."""
    command: tuple[Word, ...] = Field(min_length=1, max_length=2000)
    files: dict[FileName, str] = {}
    """Name -> text of the files that the command reads from the current folder."""
    environment: dict[Variable, Word] = {}
    checked: str = Field(max_length=500)
    """Check that the form passed."""
    notes: tuple[Annotated[str, StringConstraints(max_length=1000)], ...] = ()
    """Preparations, and differences between a trial and the command."""

    def as_shell(self) -> str:
        """The form as a shell script: comments, files, variables, command."""
        comments, lines = self.as_parts()
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return "\n".join([*comments, *lines, *_wrap(self.command)])

    def as_parts(self) -> tuple[list[str], list[str]]:
        """Its comments, and the lines of shell that write its files."""
        comments = [f"# {one_line(line, 1000)}" for line in (self.title, f"checked: {self.checked}", *self.notes)]
        lines = []
        for name, text in self.files.items():
            end = "EOF"
            while end in text.splitlines():
                end += "_"
            lines += [f"cat > {shlex.quote(name)} <<'{end}'", text.removesuffix("\n"), end]
        return comments, lines


_HUB = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/?")


def make_launch(
    card: Card, framework_name: str, config: Mapping[str, Any], *, seed: int = 0, profile: Mapping[str, str] = {}
) -> LaunchForm:
    """Launch of a configuration of the card by hand; raises UserError if the framework's run script cannot say.

    `profile` has variables of a launcher profile, such as CCL_MODEL_PATH, else the card's `hf_url` names the model.
    """
    framework = load_framework(framework_name)
    chosen = config if isinstance(config, Config) else Config(config)
    own = card.for_trial(chosen)
    fields = {"run_id": "launch", "trial": 1, "seed": seed, "options": framework.list_options(own, chosen)}
    payload = task_of(own).make_input(own, chosen, is_measured=True, **fields)
    named = _HUB.fullmatch(
        str(card.template.get("hf_url") or card.template.get("workload.model.hf_url") or card.source)
    )
    variables = {**({"CCL_MODEL_PATH": named[1]} if named else {}), **profile}
    form = _ask_script(framework, payload, variables) if framework.shows_launch else _start_script(framework, payload)
    return form.model_copy(update={"environment": {**form.environment, **framework.knob_environment(chosen)}})


def describe_launch(spec: RunSpec, config: Config) -> list[str]:
    """Launch of a configuration of a run by hand, as lines for a person."""
    try:
        form = launch_of_run(spec, config)
    except UserError as error:  # a recording may name a framework that has no file or run script
        return [f"launch of {config}: unknown: {error}"]
    return ["launch by hand:", *form.as_shell().split("\n")]


def launch_as_json(spec: RunSpec, config: Config) -> dict[str, Any]:
    """The same as plain data: the form, or the reason why it is unknown."""
    try:
        return launch_of_run(spec, config).model_dump(mode="json")
    except UserError as error:
        return {"unknown": str(error)}


def launch_of_run(spec: RunSpec, config: Config) -> LaunchForm:
    """As `make_launch`, with the variables of the run's profile. The run has its framework: none is suggested."""
    if isinstance(own_command := spec.profile.settings.get("command"), dict):
        line = fill_command(own_command["text"], config, str(filled := own_command["template"]))
        checked = f"the trial ran a copy of {filled} with its knobs filled in" if filled else "it is what the trial ran"
        return LaunchForm(title="your command", command=("/bin/sh", "-c", line), checked=checked)
    name, own = spec.framework, config
    if find_framework(name) is None:  # a table of several engines has the engine as a knob
        engines = [(knob, str(value)) for knob, value in config.items() if find_framework(str(value)) is not None]
        if not engines:
            missing = f"there is no framework {one_line(name, 60)!r}" if name else "it has no framework"
            raise UserError(f"{missing}: describe its launch in {FOLDER}/NAME{SUFFIX}")
        name = engines[0][1]
        own = Config({knob: value for knob, value in config.items() if knob != engines[0][0]})
    form = make_launch(spec.card, name, own, seed=spec.seed, profile=spec.profile.environment)
    others = {name: value for name, value in spec.profile.environment.items() if name not in IN_COMMAND}
    return form.model_copy(update={"environment": {**others, **form.environment}})


def _ask_script(framework: Framework, payload: TrialInput, variables: Mapping[str, str]) -> LaunchForm:
    command = [sys.executable, str(framework.script_path), SHOW_LAUNCH]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / CONFIG_FILE).write_text(payload.model_dump_json(), encoding="utf-8")
            environment = {**public_environment(), **variables, **trial_environment(folder, payload)}
            done = subprocess.run(
                command, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_form(framework, str(error)) from None
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise _no_form(framework, lines[-1] if lines else f"it exited with {done.returncode}")
    if len(done.stdout) > MAX_BYTES:
        raise _no_form(framework, f"it printed {len(done.stdout):,} bytes, more than {MAX_BYTES:,}")
    try:
        return LaunchForm.model_validate(_clean(json.loads(done.stdout)))
    except ValidationError as error:
        first = error.errors()[0]
        raise _no_form(framework, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:
        raise _no_form(framework, f"it printed no JSON object: {error}") from None


def _no_form(framework: Framework, why: str) -> UserError:
    return UserError(f"{framework.name}: {framework.script} {SHOW_LAUNCH} failed: {one_line(redact(why), 300)}")


def _clean(value: Any) -> Any:
    """The value with all of its text plain and without secrets."""
    if isinstance(value, str):
        return plain(redact(value))
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return {_clean(name): _clean(item) for name, item in value.items()} if isinstance(value, dict) else value


def _start_script(framework: Framework, payload: TrialInput) -> LaunchForm:
    """Return the launch of a script that is the training program itself, in the current folder."""
    script, nodes = str(framework.script_path), -(-payload.num_ranks // payload.ranks_per_node)
    notes = ["It is what a trial starts: the run script trains, times, and writes result.json to the current folder."]
    own = {"CCL_TRIAL_DIR": ".", "CCL_CONFIG": CONFIG_FILE}
    ranks = payload.num_ranks if nodes == 1 else payload.ranks_per_node
    command = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", script]
    if nodes > 1:
        meet = ["--master-addr=HEAD_NODE", "--master-port=29500"]
        command = ["torchrun", f"--nnodes={nodes}", "--node-rank=NODE_RANK", command[2], *meet, script]
        notes.append(
            "Run it on every node: NODE_RANK is the node's number from 0, HEAD_NODE the name of node 0"
            + (f"; the last node has --nproc-per-node={rest}." if (rest := payload.num_ranks % ranks) else ".")
        )
    if framework.runner == "process":
        command = ["python", script]
        if nodes > 1:
            own |= {
                "CCL_PROCESS_ID": "NODE_RANK",
                "CCL_NUM_PROCESSES": str(nodes),
                "CCL_COORDINATOR": "HEAD_NODE:29500",
            }
    return LaunchForm(
        title=f"{framework.title or framework.name}, {CONFIG_FILE} and the run script",
        command=tuple(command),
        files={CONFIG_FILE: _clean(payload.model_dump_json(indent=1))},
        environment={name: _clean(value) for name, value in {**trial_environment(Path(), payload), **own}.items()},
        checked="the command is the one that ccl-search itself uses for trials",
        notes=tuple(notes),
    )


def _wrap(words: Sequence[str]) -> list[str]:
    """Lines of a shell command, each of at most `_WIDTH` characters if its words allow."""
    lines = [shlex.quote(words[0])]
    for word in map(shlex.quote, words[1:]):
        if len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"  {word}")
    return lines
