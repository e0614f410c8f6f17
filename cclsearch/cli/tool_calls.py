"""The tools of `ccl-search mcp`, from `tools.yaml`, and the answers to a client's calls.

A command runs in a process of its own, with no more than its user could do, and with files of the project only. The
search that waits for a decision gets the others, as it gets an LLM's.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cclsearch.core.content import project_root, trial_folder
from cclsearch.core.errors import UserError
from cclsearch.core.numbers import MAX_TRIALS
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import guess_name, one_line
from cclsearch.core.values import format_knob_value
from cclsearch.core.yaml_file import read_yaml
from cclsearch.propose.agent.memory.history import past_turns
from cclsearch.propose.agent.memory.turn_records import TURNS_FOLDER
from cclsearch.propose.agent.providers.outside import ANSWER_FILE, ASKED_FILE, AskedAgent, make_answer
from cclsearch.propose.agent.providers.types import Role
from cclsearch.propose.events import DecisionKind
from cclsearch.record.lock import interrupt_holder
from cclsearch.report.summary import summarize_run
from cclsearch.run.catalog import LAST, find_run
from cclsearch.run.folder import Run, RunFollower
from cclsearch.ui.searches import SearchStarter, read_number

_CONTENT = read_yaml(Path(__file__).with_name("tools.yaml"))
TOOLS: dict[str, dict[str, Any]] = _CONTENT["tools"]
MAX_ARGUMENTS_BYTES, MAX_REPLY = 64 * 1024, 60_000
"""Sizes of a call, and of a result in characters."""
MAX_RUNNING = 4
"""Searches that clients started and that still run."""
COMMAND_S, DECIDE_S, WAIT_S, MAX_WAIT_S, LOOK_S = 120.0, 60.0, 45, 600, 0.2

Reply = tuple[str, bool]
"""Text, and whether it says why the call failed."""


def make_schema(tool: str) -> dict[str, Any]:
    """The JSON schema of a tool's arguments."""
    entry = TOOLS[tool]
    names = [*entry.get("places", () if "command" in entry else ("run",)), *entry.get("options", ())]
    return {"type": "object", "properties": {name: {"type": "string", **_CONTENT["arguments"][name]} for name in names}}


class ToolCalls:
    """Answers calls over one folder of runs."""

    def __init__(self, runs: Path, max_budget: int) -> None:
        self._runs, self._max_budget, self._starter = runs, max_budget, SearchStarter(runs)

    async def answer(self, name: str, arguments: Mapping[str, Any], by: str) -> Reply:
        """Return the reply to one call of a client that calls itself `by`; secrets in it are masked."""
        try:
            if name not in TOOLS:
                raise UserError(f"there is no tool {one_line(name, 40)!r}{guess_name(name, TOOLS)}: {', '.join(TOOLS)}")
            if len(json.dumps(arguments)) > MAX_ARGUMENTS_BYTES:
                raise UserError(f"{name}: arguments over {MAX_ARGUMENTS_BYTES} bytes are not read: send less")
            known = make_schema(name)["properties"]
            for each in arguments.keys() - known:
                guess = guess_name(each, known)
                raise UserError(f"{name} has no argument {one_line(each, 40)!r}{guess}: {', '.join(known)}")
            text, failed = await self._answer(name, dict(arguments), by)
        except UserError as error:
            text, failed = one_line(str(error), 2000), True
        text = redact(text)
        left_out = f"\n({len(text) - MAX_REPLY} characters left out)" if len(text) > MAX_REPLY else ""
        return text[:MAX_REPLY] + left_out, failed

    async def _answer(self, name: str, arguments: dict[str, Any], by: str) -> Reply:
        entry = TOOLS[name]
        if entry.get("starts"):
            return await asyncio.to_thread(self._start, name, arguments, by), False
        if "command" in entry:
            return await asyncio.to_thread(run_command, self.make_command(name, arguments))
        folder = find_run(self._read_text("run", arguments.pop("run", LAST)), self._runs)
        if name == "wait":
            seconds = {"seconds": str(arguments.get("seconds", WAIT_S))}
            return await wait_for_turn(folder, read_number(seconds, "seconds", WAIT_S, 0, MAX_WAIT_S)), False
        if name == "rules":
            request = find_asked(RunFollower(folder).read()).request
            tools = {tool.name: tool.parameters for tool in request.tools}
            return _name_tools(f"{request.system}\n\nARGUMENTS OF THE TOOLS\n{json.dumps(tools)}"), False
        if name == "stop":
            interrupt_holder(folder)
            return f"{folder.name} stops; `resume` continues it", False
        return await decide(folder, entry["turn"], arguments, by)

    def make_command(self, tool: str, arguments: Mapping[str, Any]) -> list[str]:
        """The words of a tool's command; raises UserError for a value that it cannot have."""
        entry, given = TOOLS[tool], arguments
        words = [word.format(runs=self._runs) for word in entry["command"]]
        for name in (name for name in entry.get("options", ()) if name in given):
            option, value = "--" + name.replace("_", "-"), given[name]
            for each in value if isinstance(value, list) else [value]:
                text = self._read_text(name, each)
                words += ([option] * (each is True)) if isinstance(each, bool) else [f"{option}={text}"]
        given = {"run": LAST, **given}
        places = [self._read_text(name, given[name]) for name in entry.get("places", ()) if name in given]
        if tool == "trace":
            places = [str(trial_folder(find_run(places[0], self._runs), read_number(given, "trial", 0, 1, MAX_TRIALS)))]
        return words + places

    def _read_text(self, name: str, value: object) -> str:
        """One value as a word of the command line."""
        if isinstance(value, dict):
            value = ",".join(f"{knob}={format_knob_value(each)}" for knob, each in value.items())
        text = format_knob_value(value)
        if not isinstance(value, str | int | float) or not text.isprintable() or text.startswith("-"):
            raise UserError(f"{name}: {one_line(repr(value), 60)} is not a value for it")
        if "/" in text or text.startswith(("~", ".")):
            real, project = Path(text).expanduser().resolve(), project_root()
            if not any(real.is_relative_to(folder.resolve()) for folder in (project, self._runs)):
                raise UserError(f"{name}: {one_line(text, 60)!r} is outside of {str(project)!r}: name a file in it")
        return text

    def _start(self, name: str, arguments: dict[str, Any], by: str) -> str:
        """Start or continue a search as a process of its own."""
        budget = read_number(arguments, "budget", 1, 1, MAX_TRIALS)
        if budget > self._max_budget:
            more = "its user can allow more with `ccl-search mcp --budget N`"
            raise UserError(f"budget {budget}: this server allows {self._max_budget} trials a search; {more}")
        if sum(search.state == "running" for search in self._starter.started) >= MAX_RUNNING:
            raise UserError(f"{MAX_RUNNING} searches that were started here run already: wait for one, or `stop` it")
        words = self.make_command(name, arguments)
        if name == "start":
            words += ["--llm=mcp:" + (re.sub(r"[^A-Za-z0-9._-]+", "-", by).strip("-._")[:80] or "agent")]
        return f"{self._starter.launch(words, name)}. Call `wait`"


def run_command(words: list[str]) -> Reply:
    """Run a command; returns what it printed, or the line about what is wrong."""
    command = [sys.executable, "-P", "-m", "cclsearch", *words]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"`ccl-search {words[0]}` took over {COMMAND_S:.0f} s and was ended") from None
    if done.returncode in (0, 1) and done.stdout:
        return done.stdout, False
    return (done.stderr.strip().splitlines() or ["it printed nothing"])[-1].removeprefix("ccl-search: "), True


def find_asked(run: Run) -> AskedAgent:
    """Return the request that the search waits for; raises UserError if it waits for none."""
    name, turns, last = run.folder.name, run.folder / TURNS_FOLDER, run.state.ended or run.state.stopped
    asked = AskedAgent.read(turns / ASKED_FILE) if run.is_running and not (turns / ANSWER_FILE).exists() else None
    if asked is not None:
        return asked
    if run.is_running:
        running = ", ".join(f"trial {trial.number} ({trial.config}) runs" for trial in run.state.unfinished)
        raise UserError(f"{name} asks for no decision now: {running or 'it prepares a trial'}; call `wait`")
    raise UserError(f"{name} {run.status}: {last.reason if last else 'its process is gone'}; `resume` continues it")


async def wait_for_turn(folder: Path, seconds: int) -> str:
    """Return what the search shows once it asks for a decision, how it ended, or what runs after so many seconds."""
    follower, until_s = RunFollower(folder), time.monotonic() + seconds
    while True:
        run = follower.read()
        try:
            messages = reversed(find_asked(run).request.messages)
            return _name_tools(next(each.text for each in messages if each.role is Role.USER and not each.results))
        except UserError as error:
            # between the making of its folder and its first event a search has no lock
            if not run.is_running and run.state.has_begun:
                return "\n".join([str(error), *summarize_run(run.spec, run.state, folder)])
            if time.monotonic() >= until_s:
                return str(error)
        await asyncio.sleep(LOOK_S)


async def decide(folder: Path, tool: str, arguments: dict[str, Any], by: str) -> Reply:
    """Answer the search that waits with the call of a tool; returns what the search says of it."""
    follower, turns, until_s = RunFollower(folder), folder / TURNS_FOLDER, time.monotonic() + DECIDE_S
    run = follower.read()
    asked, num_turns = find_asked(run), len(past_turns(run.state.reported))
    tools = [each.name for each in asked.request.tools]
    if tool not in tools:
        raise UserError(f"this search has no tool {tool!r}: it has {', '.join(tools)}")
    try:
        with (turns / ANSWER_FILE).open("x") as file:
            file.write(make_answer(asked, tool, arguments, by).model_dump_json())
    except FileExistsError:
        raise UserError("another call is being answered: send this one again after it") from None
    while time.monotonic() < until_s and run.is_running:
        await asyncio.sleep(LOOK_S)
        run, now = follower.read(), AskedAgent.read(turns / ASKED_FILE)
        said = now.request.messages[-1] if now is not None and now.id != asked.id else None
        for result in said.results if said else ():
            if said and result.id == asked.id:
                return _name_tools(f"{result.text}\n{said.text}"), result.is_error
        for turn in past_turns(run.state.reported)[num_turns:]:
            if turn.decision is not DecisionKind.REVISE:  # an earlier one is recorded with the turn that followed it
                return turn.text, turn.decision is DecisionKind.NONE
        if said is not None:
            return "taken; the search asks you again: call `wait`", False
    return "the search has not said yet what becomes of it: call `wait`", True


def _name_tools(text: str) -> str:
    """The text with the tools' names here."""
    return re.sub(r"\bsubmit\b", "propose", text)
