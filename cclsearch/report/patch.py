"""Only the tuned options of a configuration, in the framework's own form, for a job that the user has already."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import yaml

from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.launch.contract import CONFIG_FILE
from cclsearch.report.launch_form import LaunchForm, launch_of_run
from cclsearch.run.spec import RunSpec
from cclsearch.space.framework import load_framework
from cclsearch.space.table import Space

_STARTS_RANKS = re.compile(
    r"--(nnodes|nproc-per-node|node-rank|master-addr|master-port|standalone|machine_rank|main_proc)"
)

Parts = dict[str, str]
"""Name of an option, `FILE:dotted.path` or `$VARIABLE` -> how it is written."""


def write_patch(spec: RunSpec, space: Space, config: Config) -> str:
    """Return the options, fields of files and variables that knobs decide, and what the user's job must not have.

    Raises UserError if the framework has no form of its own. The options are those that differ in other configurations.
    """
    framework = load_framework(spec.framework)
    if not framework.shows_launch:
        raise UserError(f"{framework.name} has no options of its own: its configuration is {config}")
    form = launch_of_run(spec, config)
    own = _split(form)
    with ThreadPoolExecutor(4) as pool:
        others = [
            parts for parts in pool.map(lambda other: _try(spec, other), _vary(space, config)) if parts is not None
        ]
    tuned = {name: text for name, text in own.items() if any(other.get(name) != text for other in others)}
    absent = sorted({name for other in others for name in other if name not in own and ":" not in name})
    lines = [f"# {form.title}: what the search chose ({config})"]
    lines += [text for name, text in tuned.items() if ":" not in name]
    for file, text in form.files.items():
        lines += _write_fields(
            file, text, {n.split(":", 1)[1]: t for n, t in tuned.items() if n.startswith(f"{file}:")}
        )
    if absent:
        lines.append(f"# without: {' '.join(absent)}")
    return "\n".join(lines)


def _vary(space: Space, config: Config) -> Iterator[Config]:
    """Yield, for the first and last other choice of each knob, the nearest configuration of the space to this one."""
    codes = space.codes_NK
    own = [knob.choices.index(config[knob.name]) for knob in space.knobs]
    alike = (codes == own).sum(axis=1)
    for column, knob in enumerate(space.knobs):
        others = [choice for choice in range(len(knob.choices)) if choice != own[column]]
        for choice in {*others[:1], *others[-1:]}:
            rows = (codes[:, column] == choice).nonzero()[0]
            if len(rows):
                yield space.config(int(rows[alike[rows].argmax()]))


def _try(spec: RunSpec, config: Config) -> Parts | None:
    try:
        return _split(launch_of_run(spec, config))
    except UserError:  # a choice that the script refuses decides nothing
        return None


def _split(form: LaunchForm) -> Parts:
    """Return the parts of a form: options with their values, fields of its files, variables."""
    parts, name = (
        {f"${variable}": f"export {variable}={shlex.quote(v)}" for variable, v in form.environment.items()},
        "",
    )
    for word in form.command:
        if word.startswith("-") or "=" in word or re.match(r"[a-z_]+:[a-z]", word):
            name = word.split("=", 1)[0] if "=" in word else word.split(":", 1)[0]
            parts[name] = shlex.quote(word)
        elif name and "=" not in parts[name]:
            parts[name] += f" {shlex.quote(word)}"
    parts = {name: text for name, text in parts.items() if not _STARTS_RANKS.match(name)}
    for file, text in form.files.items():
        if file != CONFIG_FILE:
            parts |= {f"{file}:{path}": value for path, value in _read_fields(file, text)}
    return parts


def _read_fields(file: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a YAML or JSON file, or the assignments of Python."""
    if file.endswith(".py"):
        yield from ((line.split(" = ", 1)[0].strip(), line.strip()) for line in text.splitlines() if " = " in line)
        return
    if file.endswith((".yaml", ".yml", ".json")):
        yield from ((path, json.dumps(value)) for path, value in _leaves(yaml.safe_load(text), ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _write_fields(file: str, text: str, fields: Mapping[str, str]) -> list[str]:
    """Return the fields in the file's own form, under its name; of Python with the imports of its functions."""
    if not fields:
        return []
    if file.endswith(".py"):
        imports = [line.strip() for line in text.splitlines() if line.startswith("    from ")]
        body = [f"    {line}" for line in (*imports, *fields.values())]
        return [f"# {file}", "def patch(config):", *body, "    return config"]
    whole: dict[str, Any] = {}
    for path, value in fields.items():
        *above, last = path.split(".")
        here = whole
        for name in above:
            here = here.setdefault(name, {})
        here[last] = json.loads(value)
    written = json.dumps(whole, indent=1) if file.endswith(".json") else yaml.safe_dump(whole, sort_keys=False).rstrip()
    return [f"# {file}", written]
