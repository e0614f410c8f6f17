"""Reads the evidence in a run's folder for its report: files of trials, LLM turns, versions, nodes and inputs.

Files are written by trials and providers: their text is data, its secrets are masked, and its length is limited.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cclsearch.core.job_file import JobFileError, hash_job_file, read_job_json, read_tail
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line, plain
from cclsearch.core.version import __version__
from cclsearch.launch.contract import RESULT_FILE, STDERR_FILE, STDOUT_FILE
from cclsearch.run.folder import Run
from cclsearch.run.spec import SPEC_FILE

JOB_SCRIPT = "job.sh"
FILES = ("config.json", JOB_SCRIPT, STDOUT_FILE, STDERR_FILE, RESULT_FILE, "trace")
MAX_SCRIPT = 40_000
MAX_MESSAGE = 20_000
MAX_TURN_BYTES = 20_000_000
MAX_VERSIONS = 30


@dataclass(frozen=True)
class TurnMessage:
    """One message of a conversation with an LLM."""

    role: str
    """`system`, `engine` or `assistant`."""
    who: str
    text: str


@dataclass(frozen=True)
class TurnView:
    """One turn of the LLM as a conversation."""

    number: int
    summary: str
    messages: tuple[TurnMessage, ...]


def list_files(folder: Path) -> tuple[str, ...]:
    """The files of a trial that a reader opens."""
    try:
        there = set(os.listdir(folder))
    except OSError:
        return ()
    return tuple(name for name in FILES if name in there)


def read_script(folder: Path) -> str:
    """The job script of a trial; empty if it has none."""
    return _block(read_tail(folder / JOB_SCRIPT, MAX_SCRIPT), MAX_SCRIPT)


def gather_turns(folder: Path) -> tuple[TurnView, ...]:
    """The turns of the LLM in order; a file that is damaged is left out."""
    try:
        names = sorted(name for name in os.listdir(folder / "turns") if name[:-5].isdigit() and name.endswith(".json"))
    except OSError:
        return ()
    turns = [_read_turn(folder / "turns" / name) for name in names]
    return tuple(turn for turn in turns if turn is not None)


def _read_turn(path: Path) -> TurnView | None:
    data = read_record(path)
    if data is None:
        return None
    result = data.get("result")
    answered = result if isinstance(result, dict) else data
    exchanges = answered.get("exchanges")
    messages = [
        TurnMessage("system", "ccl-search, to every turn", _block(data.get("system"), MAX_MESSAGE)),
        TurnMessage("engine", "ccl-search", _block(data.get("user"), MAX_MESSAGE)),
    ]
    for exchange in exchanges if isinstance(exchanges, list) else []:
        if isinstance(exchange, dict):
            messages += _describe_exchange(exchange)
    number = data.get("turn")
    decision = answered.get("decision")
    kind = decision if isinstance(decision, str) else "a decision" if decision else "no decision"
    count = sum(message.role == "assistant" for message in messages)
    summary = f"{one_line(kind, 60)}, {count} answer{'' if count == 1 else 's'}"
    kept = tuple(message for message in messages if message.text)
    return TurnView(number if isinstance(number, int) else int(path.stem), summary, kept)


def _describe_exchange(exchange: Mapping[str, Any]) -> list[TurnMessage]:
    answer = exchange.get("answer")
    if not isinstance(answer, dict):
        error = exchange.get("error") or exchange.get("trouble") or "no answer"
        return [TurnMessage("engine", "request failed", _block(f"{error}: {exchange.get('message', '')}", 2000))]
    messages = [TurnMessage("assistant", "LLM", _block(_unfold(answer.get("text")), MAX_MESSAGE))]
    calls = answer.get("calls")
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict):
            arguments = json.dumps(call.get("arguments"), indent=2, ensure_ascii=False).replace("\\n", "\n")
            name = one_line(str(call.get("name")), 80)
            messages.append(TurnMessage("assistant", f"LLM calls {name}", _block(arguments, MAX_MESSAGE)))
    results = exchange.get("results")
    for result in results if isinstance(results, list) else []:
        if isinstance(result, dict):
            who = "ccl-search refuses the call" if result.get("is_error") else "ccl-search answers the call"
            messages.append(TurnMessage("engine", who, _block(result.get("text"), MAX_MESSAGE)))
    return messages


def _unfold(text: object) -> object:
    """An answer that is JSON, with a line per field and the line ends of its strings; other text as it is."""
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return text
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False).replace("\\n", "\n")
    except ValueError:
        return text


def gather_environment(run: Run) -> tuple[tuple[str, str], ...]:
    """Versions, nodes and inputs: of the best trial, else of the first that has a result."""
    spec, best = run.spec, run.state.best
    numbers = ([best.number] if best else []) + list(run.state.trials)
    found = ((number, read_record(run.trial_folder(number) / RESULT_FILE)) for number in numbers[:20])
    number, result = next(((number, data) for number, data in found if data), (None, {}))
    rows: list[tuple[str, object]] = [
        ("ccl-search", f"{spec.engine_version} ran the search, {__version__} wrote this page"),
        ("started", spec.created),
        *([("command line", spec.command)] if spec.command else []),
        ("framework", spec.framework),
        *([("folder of the run script", spec.script_commit)] if spec.script_commit else []),
        ("launcher", spec.profile.launcher),
        ("proposed by", spec.proposers),
        ("seed", spec.seed),
        ("search space", f"{spec.space_size:,} configurations, sha256 {spec.space_sha256[:16]}"),
        (SPEC_FILE, f"sha256 {(hash_job_file(run.folder / SPEC_FILE) or 'unknown')[:16]}"),
    ]
    if spec.recording:
        rows.append(("recording", f"{spec.recording.name}, sha256 {spec.recording.sha256[:16]}"))
    hosts = result.get("hosts") if result else None
    if isinstance(hosts, list) and hosts:
        rows.append((f"nodes of trial {number}", ", ".join(sorted({str(host) for host in hosts}))))
    versions = result.get("versions") if result else None
    for name, version in list(versions.items())[:MAX_VERSIONS] if isinstance(versions, dict) else []:
        rows.append((str(name), version))
    rows.append(("to continue or repeat", f"ccl-search resume {spec.run_id}"))
    return tuple((one_line(redact(label), 80), one_line(redact(str(value)), 400)) for label, value in rows)


def read_record(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file of a job; None if it is missing, damaged or too large."""
    try:
        data = read_job_json(path, MAX_TURN_BYTES)
    except (OSError, JobFileError):
        return None
    return data if isinstance(data, dict) else None


def _block(text: object, limit: int) -> str:
    """Text of several lines from outside: plain, without secrets, cut at the limit."""
    if not isinstance(text, str):
        return ""
    safe = "\n".join(plain(line) for line in redact(text).split("\n"))
    return safe if len(safe) <= limit else f"{safe[:limit]}\n… ({len(safe) - limit:,} more characters)"
