"""`ccl-search init`: create a project folder that can run a search at once."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from pathlib import Path

from cclsearch.core.content import find_content
from cclsearch.core.errors import UserError

SUFFIXES = (".yaml", ".yml")
FOLDERS = ("workloads", "launchers", "objectives", "policies", "runs")
_SETTINGS = """\
# Defaults of this project; command-line options take precedence. API keys come from the environment only.
version: 1
# A profile in launchers/. Without one, `ccl-search run` uses this machine, or the workload's recording.
{launcher}
# The LLM that proposes trials with the optimizer: anthropic:MODEL, openai:MODEL, or a compatible server's URL.
{llm}
# The objective: a file in objectives/, or a metric. Without one, that of the workload's task.
{objective}
runs: runs
"""
_CARD = """\
version: 1
description: a small transformer that trains on the CPUs of this machine; replace it with your model
source: example of ccl-search init
workload:
  model:
    phase: training
    moe: false
    model_family: mine
    precision: fp32
    model_arch: # the widths of your model (see config.json on its model page)
      num_layers: 4
      num_heads: 8
      num_kv_heads: 4
      head_dim: 32
      hidden_size: 256
      intermediate_size: 512
      vocab_size: 1024
      tied_embeddings: false
  data:
    batch_size: 16 # global batch: sequences per optimizer step over all accelerators, fixed for the whole search
    seq_len: 128
  hardware:
    network_topo:
      bandwidth_gbps: [10, 16] # [between nodes, inside a node] in Gbit/s per accelerator and direction
    xpu_spec:
      type: CPU
      model: cpu # or nvidia_h100, nvidia_a100, tpu_v6e, ... (describe any other in a hardware.yaml)
      memory_gb: 4
      total_count: 4
      count_per_node: 4
Model-executor:
  framework:
    name: cpu # or megatron, torchtitan, maxtext, jax-cpu
"""
_IGNORE = "runs/*\n"


def run(args: argparse.Namespace) -> int:
    """Write the project and print the next command."""
    folder = Path(args.directory).expanduser()
    answers = _defaults() if args.yes else _ask(folder)
    files = plan_project(folder, answers)
    write_project(folder, files)
    print(f"wrote {len(files)} files in {folder}: " + ", ".join(str(name) for name in files))
    where = "" if folder.resolve() == Path.cwd().resolve() else f"cd {shlex.quote(str(folder))} && "
    profile = answers["launcher"]
    runs_here = not profile or find_launcher(folder, profile) == "local"
    if not runs_here:
        print(f"next: {where}ccl-search launcher check {profile}   (describe its hardware in workloads/mine.yaml)")
    place = "on this machine" if runs_here else f"on the machines of profile {profile!r}, not on this machine"
    print(f"{'next' if runs_here else 'then'}: {where}ccl-search run --workload mine --budget 5   (it trains {place})")
    return 0


def plan_project(folder: Path, answers: dict[str, str]) -> dict[Path, str]:
    """Path -> text of the project's files; raises UserError if one of them, or a file named like the folder, exists."""
    settings = _SETTINGS.format(
        launcher=f"launcher: {answers['launcher']}" if answers["launcher"] else "# launcher: slurm-generic",
        llm=f"llm: {answers['llm']}" if answers["llm"] else "# llm: anthropic:MODEL",
        objective=f"objective: {answers['objective']}" if answers["objective"] else "# objective: cost",
    )
    files = {Path("ccl-search.yaml"): settings, Path("workloads/mine.yaml"): _CARD, Path(".gitignore"): _IGNORE}
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"{str(folder)!r} must be a folder, but it is a file; give another name")
    taken = [str(name) for name in files if os.path.exists(folder / name) and name != Path(".gitignore")]
    if taken:
        raise UserError(f"{str(folder)!r} already has {', '.join(taken)}; nothing was written. Give another folder")
    if os.path.exists(folder / ".gitignore"):
        del files[Path(".gitignore")]
    return files


def write_project(folder: Path, files: dict[Path, str]) -> None:
    """Write the folders and files; raises UserError if that fails."""
    try:
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with (folder / path).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or str(folder)!r}: {error.strerror or error}") from None


def _defaults() -> dict[str, str]:
    return {"launcher": "", "llm": "", "objective": ""}


def _ask(folder: Path) -> dict[str, str]:
    """Three checked answers from the terminal; raises UserError if there is no terminal."""
    questions = {
        "launcher": "cluster profile in launchers/ (empty: this machine or a recording): ",
        "llm": "LLM: anthropic:MODEL, openai:MODEL or a URL (empty: none): ",
        "objective": "objective in objectives/ (empty: the task's): ",
    }
    answers = {}
    for name, question in questions.items():
        try:
            answers[name] = check_name(name, check_answer(name, input(question)), folder)
        except (EOFError, OSError, RuntimeError):  # no standard input at all raises RuntimeError
            print(file=sys.stderr)
            raise UserError("no terminal for the questions: use `ccl-search init --yes` for the defaults") from None
    return answers


def check_answer(question: str, answer: str) -> str:
    """The stripped answer; raises UserError if YAML or a shell could interpret it as more than one word."""
    value = answer.strip()
    if value and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@+\-]{0,200}", value):
        raise UserError(f"{question} must be one word of letters, digits and . _ : / @ + -, not {value[:80]!r}")
    return value


def check_name(question: str, value: str, folder: Path) -> str:
    """The same answer; raises UserError with the known names if it is unknown in the new project."""
    from cclsearch.propose.agent.providers.spec import parse_spec
    from cclsearch.score.objective import load_objective, split_spec

    if value and question == "launcher":
        find_launcher(folder, value)
    elif value and question == "llm":
        parse_spec(value)
    elif value:
        path = find_content("objectives", _require_bare(question, split_spec(value)[0]), *SUFFIXES, project=folder)
        load_objective(str(path))
    return value


def find_launcher(folder: Path, name: str) -> str:
    """Launcher (`local`, `slurm`, ...) of a profile, looked up from the project in `folder`; UserError if unknown."""
    from cclsearch.launch.profile import load_profile

    path = find_content("launchers", _require_bare("launcher", name), *SUFFIXES, project=folder)
    return load_profile(str(path)).launcher


def _require_bare(question: str, name: str) -> str:
    """The name if it is bare: a path relative to here would be wrong from inside the project."""
    if "/" in name or name.endswith(SUFFIXES):
        raise UserError(
            f"{question} must be a bare name, not a file, because it is looked up in the project's folders: {name!r}"
        )
    return name
