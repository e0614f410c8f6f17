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

_STARTS_RANKS = re.compile(r"--(n?nodes|nproc-per-node|node-rank|master-|standalone|machine_rank|main_process)")


def write_patch(spec: RunSpec, space: Space, config: Config) -> str:
    """Return the options, fields of files and variables that knobs decide: those that other configurations write
    otherwise. A last line has the options of others that this one does without.

    Raises UserError if the framework has no form of its own.
    """
    if not load_framework(spec.framework).shows_launch:
        raise UserError(f"{spec.framework} has no options of its own: its configuration is {config}")
    form = launch_of_run(spec, config)
    with ThreadPoolExecutor(4) as pool:
        others = list(filter(None, pool.map(lambda other: _try(spec, other), _vary(space, config))))
    own = _split(form)
    tuned = {name: text for name, text in own.items() if any(other.get(name) != text for other in others)}
    lines = [f"# {form.title}: what the search chose ({config})", *(tuned[name] for name in tuned if ":" not in name)]
    for file, text in form.files.items():
        lines += _write_fields(
            file, text, {n.split(":", 1)[1]: t for n, t in tuned.items() if n.startswith(f"{file}:")}
        )
    absent = sorted({name for other in others for name in other if name not in own and ":" not in name})
    return "\n".join([*lines, *([f"# without: {' '.join(absent)}"] if absent else [])])


def _vary(space: Space, config: Config) -> Iterator[Config]:
    """Yield, for the first and last other choice of each knob, the nearest configuration of the space to this one."""
    own = [knob.choices.index(config.get(knob.name, knob.neutral)) for knob in space.knobs]
    alike = (space.codes_NK == own).sum(axis=1)
    for column, knob in enumerate(space.knobs):
        others = [choice for choice in range(len(knob.choices)) if choice != own[column]]
        for choice in {*others[:1], *others[-1:]}:
            rows = (space.codes_NK[:, column] == choice).nonzero()[0]
            if len(rows):
                yield space.config(int(rows[alike[rows].argmax()]))


def _try(spec: RunSpec, config: Config) -> dict[str, str] | None:
    try:
        return _split(launch_of_run(spec, config))
    except UserError:  # a choice that the script refuses decides nothing
        return None


def _split(form: LaunchForm) -> dict[str, str]:
    """Return `OPTION`, `$VARIABLE` or `FILE:dotted.path` -> how it is written."""
    parts, name = (
        {f"${variable}": f"export {variable}={shlex.quote(v)}" for variable, v in form.environment.items()},
        "",
    )
    for word in form.command:
        if word.startswith("-") or "=" in word or re.match(r"[a-z_]+:[a-z]", word):
            name = re.split("[=:]", word)[0]
            parts[name] = shlex.quote(word)
        elif name and "=" not in parts[name]:
            parts[name] += f" {shlex.quote(word)}"
    parts = {name: text for name, text in parts.items() if not _STARTS_RANKS.match(name)}
    for file, text in form.files.items():
        if file.endswith(".py"):
            lines = [line.strip() for line in text.splitlines() if " = " in line]
            parts |= {f"{file}:{line.split(' = ')[0]}": line for line in lines}
        elif file != CONFIG_FILE and file.endswith((".yaml", ".json")):
            parts |= {f"{file}:{path}": json.dumps(value) for path, value in _leaves(yaml.safe_load(text), "")}
    return parts


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, item in value.items():
        yield from _leaves(item, f"{path}.{name}".removeprefix("."))


def _write_fields(file: str, text: str, fields: Mapping[str, str]) -> list[str]:
    """Return the fields in the file's own form, under its name; of Python with the imports of its functions."""
    if file.endswith(".py") and fields:
        imports = [line.strip() for line in text.splitlines() if line.startswith("    from ")]
        body = [f"    {line}" for line in (*imports, *fields.values(), "return config")]
        return [f"# {file}", "def patch(config):", *body]
    whole: dict[str, Any] = {}
    for path, value in fields.items():
        *above, last = path.split(".")
        here = whole
        for name in above:
            here = here.setdefault(name, {})
        here[last] = json.loads(value)
    written = json.dumps(whole, indent=1) if file.endswith(".json") else yaml.safe_dump(whole, sort_keys=False).rstrip()
    return [f"# {file}", written] if fields else []
