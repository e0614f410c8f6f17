"""The trials of a run as rows, for every table, chart, page and exported file, and the evidence in its folder.

Files are written by trials and providers: their text is data, its secrets are masked, and its length is limited.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cclsearch.charts.trials import BEST, CONFIRMED, ENDED_EARLY, FAILED, NOT_ADMITTED, RANKED, RUNNING, TrialPoint
from cclsearch.core.job_file import JobFileError, hash_job_file, read_job_json, read_tail
from cclsearch.core.metrics import NUM_ACCELERATORS
from cclsearch.core.secrets.redact import redact
from cclsearch.core.text import one_line, plain
from cclsearch.core.values import Provenance, Value, format_config, format_knob_value
from cclsearch.core.version import __version__
from cclsearch.launch.contract import RESULT_FILE, STDERR_FILE, STDOUT_FILE
from cclsearch.record.event import Purpose
from cclsearch.record.trial import Trial, TrialState, find_state
from cclsearch.report.figures import ObjectiveFigure
from cclsearch.report.terminal import SOURCES, result_text
from cclsearch.run.folder import Run
from cclsearch.run.spec import SPEC_FILE
from cclsearch.scoring.outcome import Outcome, Verdict
from cclsearch.space.table import count_ranks
from cclsearch.tasks.base import task_of

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


MAX_TEXT = 2000
KINDS = {
    TrialState.ADMITTED: RANKED,
    TrialState.REFUSED: NOT_ADMITTED,
    TrialState.PRUNED: ENDED_EARLY,
    TrialState.UNFINISHED: RUNNING,
}
"""State of a trial -> its word in charts, reports and exported files; any other state is a failure there."""


def clean(text: str) -> str:
    """The text as one safe line without secrets."""
    return one_line(redact(text), MAX_TEXT)


@dataclass(frozen=True)
class TrialRow:
    """One trial. All text is plain: no control characters, no secrets."""

    number: int
    config: Mapping[str, Value]
    proposer: str
    purpose: Purpose
    state: TrialState
    result: str = ""
    """Its figure, or how it failed."""
    reason: str = ""
    """Reason why it is not ranked; empty if it is, or runs."""
    failure_kind: str = ""
    figure: float | None = None
    """Measured figure of the objective, also of a trial that is not ranked; None if it has none."""
    value: float | None = None
    """The primary metric; None unless the trial is ranked."""
    violation: float | None = None
    """Excess over the objective's constraints, relative to their bounds; None if it has no result."""
    loss: float | None = None
    """None unless the trial is ranked."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    spread: float | None = None
    expected: Mapping[str, float] = field(default_factory=dict)
    """Metrics that were expected before the run."""
    seconds: float | None = None
    """Seconds from the submission to the end of all ended attempts; None if none ended."""
    wall_s: float | None = None
    """Seconds from proposal to end, queue time included; None while the trial runs or if nothing ran."""
    rationale: str = ""
    """Reason of the proposer; only `make_detailed_row` fills this field and the next ones."""
    checks: tuple[Verdict, ...] = ()
    """The rules of the admission gate."""
    notes: tuple[str, ...] = ()
    diagnosis: tuple[str, ...] = ()
    seconds_by_cause: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    """Folder of the trial's evidence, relative to the run folder."""
    files: tuple[str, ...] = ()
    """Files in that folder that readers open: logs, result, trace."""

    @property
    def score(self) -> float | None:
        """The figure; None unless the trial is ranked."""
        return None if self.loss is None else self.figure

    @property
    def by(self) -> str:
        """Its proposer, as people name it: `surrogate`, `LLM`."""
        return SOURCES.get(self.proposer, self.proposer)

    @property
    def kind(self) -> str:
        """`ranked`, `not admitted`, `ended early`, `failed` or `running`."""
        return KINDS.get(self.state, FAILED)

    @property
    def config_text(self) -> str:
        return format_config(self.config)

    @property
    def accelerator_hours(self) -> float | None:
        if self.wall_s is None:
            return None
        return self.wall_s * self.metrics.get(NUM_ACCELERATORS, count_ranks(self.config)) / 3600

    @cached_property
    def text(self) -> str:
        """Text that a filter searches: all columns, in lower case."""
        words = (self.number, self.config_text, self.by, self.purpose, self.state, self.result, self.reason)
        return " ".join(map(str, words)).lower()

    def cell(self, knob: str) -> str:
        """The value of a knob as tables print it; empty if the trial has none."""
        return format_knob_value(self.config[knob]) if knob in self.config else ""

    def as_point(self, best: int | None, value: float | None, expected: float | None = None) -> TrialPoint:
        """The trial in a chart of `value`; `best` is the number of the best trial."""
        kind = self.kind
        if self.number == best:
            kind = BEST
        elif kind == RANKED and self.purpose is Purpose.CONFIRMATION:
            kind = CONFIRMED
        note = f"{self.failure_kind} {self.reason}".strip()
        return TrialPoint(self.number, self.config, kind, value, self.spread, expected, self.by, note, self.metrics)


def make_row(trial: Trial, figure: ObjectiveFigure, primary: str, clean: Callable[[str], str] = clean) -> TrialRow:
    """The row of a trial without its details; `primary` names the task's primary metric."""
    outcome = trial.outcome
    failure, ranked = outcome.failure if outcome else None, trial.loss is not None
    metrics = dict(outcome.metrics) if outcome else {}
    return TrialRow(
        number=trial.number,
        config=dict(trial.config),
        proposer=clean(trial.proposer),
        purpose=trial.purpose,
        state=find_state(trial.outcome),
        result=clean(result_text(trial, figure)),
        reason=clean(trial.reason),
        failure_kind=failure.kind.value if failure else "",
        figure=figure.value(trial),
        value=metrics.get(primary) if ranked else None,
        violation=outcome.violation if outcome and not failure else None,
        loss=trial.loss,
        metrics=metrics,
        spread=outcome.spread if outcome else None,
        expected=trial.expects.metrics,
        seconds=sum(end_s - start_s for start_s, end_s in trial.spans) if trial.spans else None,
    )


def make_detailed_row(run: Run, trial: Trial, figure: ObjectiveFigure) -> TrialRow:
    """The row of a trial with its rationale, its verdicts, its diagnosis and its files."""
    outcome, folder = trial.outcome or Outcome(provenance=run.spec.provenance), run.trial_folder(trial.number)
    is_over = run.spec.provenance is Provenance.MEASURED and trial.finished_s is not None
    return replace(
        make_row(trial, figure, task_of(run.spec.card).primary),
        wall_s=(trial.finished_s or 0.0) - trial.proposed_s if is_over else None,
        rationale=clean(trial.rationale),
        checks=tuple(verdict.model_copy(update={"detail": clean(verdict.detail)}) for verdict in outcome.verdicts),
        notes=tuple(map(clean, (*trial.remarks, *outcome.notes))),
        diagnosis=tuple(map(clean, outcome.diagnosis)),
        seconds_by_cause={clean(k.replace("_", " ")): s for k, s in outcome.seconds_by_cause.items()},
        evidence=folder.relative_to(run.folder).as_posix(),
        files=list_files(folder),
    )
