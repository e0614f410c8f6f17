"""Reads the logs of failed trials: the root failure, its rank, its node, and whether the node is to blame.

Lines of several ranks are mixed in a log, with labels of launchers in front. A line's labels say whose it is; so each
rank's own lines are read in order, with the exceptions, chains and native messages in them. Memory does not grow with
the log, and each line is looked at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cclsearch.core.job_file import JobFileError, open_job_file
from cclsearch.core.text import one_line
from cclsearch.core.values import MEMORY_HINT, FailureKind
from cclsearch.launch.fault_rules import CLASSES, FaultClass, FaultRules, project_rules, shipped_rules

MAX_LINE_BYTES = 8192
"""A longer line is read in pieces of this size."""
MAX_LOG_BYTES = 1 << 26
"""Of a larger log the last part is read."""
MAX_STREAMS = 1 << 16
"""Ranks whose lines are read separately; those of any more count as one rank's."""
MAX_MESSAGE = 1000
_MAX_BELOW = 8
"""Lines after an exception that may belong to its message."""

_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_NAMED = re.compile(
    r"^(?:Uncaught |Unhandled )?"
    r"(?:[A-Za-z_][\w.]{0,200}\.)?(?:[A-Z]\w{0,100}(?:Error|Exception|Failure|Exit|Interrupt|Config)(?:\(\w{1,100}\))?"
    r"|JaxRuntimeError)(?::|$)"
)
_AFTER_TRACEBACK = re.compile(r"^[A-Za-z_][\w.]{0,200}(?:\(\w{1,100}\))?(?::|$)")
_CAUSED_BY = re.compile(r"^Caused by: ?(?=\S)")
_TERMINATE = re.compile(r"terminate called after throwing an instance of '([^']{1,200})'")
_REPORTS = frozenset(("report", "killed", "fault"))
_REPORTED_LABELS = ("rank", "group", "task", "local", "node")
_SUMMARY = re.compile(r"Root Cause \(first observed failure\)|BAD TERMINATION")
_WRAPS = re.compile(r"[\w.]*RayTaskError\(")
_MORE = re.compile(r"nccl\w{1,40}: |Last error:")


@dataclass(frozen=True)
class LogFault:
    """The root failure in a log."""

    kind: FailureKind
    message: str
    """The exception or native message, without labels."""
    rank: int | None
    node: str | None
    """The machine, as the log names it."""
    blames_node: bool
    """Whether the machine is at fault, so that the trial should run elsewhere."""
    line: int
    """Number of the line, from 1."""
    fault: FaultClass

    @property
    def is_cause(self) -> bool:
        """Whether the log shows more than that a rank lost its peers, or that a process ended."""
        return self.fault.level <= 2 or self.fault.name in ("killed", "fault", "warned")


@dataclass
class _Found:
    """The first failure of a level, with the labels that name its rank and node."""

    fault: FaultClass
    message: str
    line: int
    labels: dict[str, str]
    """What launchers wrote in front of the line."""
    named: dict[str, str]
    """Rank and node in the text itself."""


@dataclass
class _Stream:
    """What is open in the lines of one rank."""

    indent: int | None = None
    """Indentation of the open traceback."""
    is_chained: bool = False
    thrown: str = ""
    """Type of the C++ exception that ended the process."""
    head: list[str] = field(default_factory=list)
    """The last exception and the lines after it, while they may belong to it."""
    kept: _Found | None = None
    """The failure of that exception, if it is the first of its level."""
    is_summary: bool = False

    @property
    def is_open(self) -> bool:
        return self.indent is not None or bool(self.head)


class LogReader:
    """Takes the lines of one log in order; `conclude` returns the root failure."""

    def __init__(self, rules: FaultRules | None = None) -> None:
        self.rules = rules or project_rules()
        self.examined_chars = 0
        """Characters that were compared with patterns: the reader's work."""
        self.reported: dict[str, str] = {}
        """Rank and node that a launcher's report names as the first that failed."""
        self._best: dict[int, _Found] = {}
        self._ended: _Found | None = None
        self._has_summary = False
        self.streams: dict[tuple[str, ...], _Stream] = {}
        """Labels of a rank -> what is open in its lines."""
        self._open: set[tuple[str, ...]] = set()
        self._line = 0
        self._whole = ""
        self._nodes: dict[tuple[str, str], str] = {}
        """Rank or task -> the node that a launcher's report names with it."""

    def feed(self, line: str) -> None:
        """Take the next line."""
        self._line += 1
        cues = self.rules.find_cues(line.lower())
        if not cues and not self._open:
            return
        self.examined_chars += len(line)
        self._whole = line
        labels, text = self.rules.peel(line)
        key = tuple(labels.get(name, "") for name in ("rank", "group", "task", "local", "node", "pid"))
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams.setdefault(key if len(self.streams) < MAX_STREAMS else (), _Stream())
        if cues or stream.is_open:
            self._take(stream, labels, text, cues)
            (self._open.add if stream.is_open else self._open.discard)(key)

    def conclude(self) -> LogFault | None:
        """Return the root failure of all lines; None if there is none."""
        if not self._best:
            return None
        best = self._best[min(self._best)]
        if self._ended and best.fault.level > 1 and self._ended.line < best.line:
            best = self._ended
        message, fault = best.message, best.fault
        if fault.name == "killed" and MEMORY_HINT not in message:
            message = f"{message} (SIGKILL: {MEMORY_HINT})"
        own, labels = best.named.get("node"), best.labels
        reported = {} if own and self.reported.get("node", own) != own else self.reported
        rank = _choose_rank(labels, best.named, {} if fault.ends_job else reported, is_cause=fault.level <= 2)
        is_same = rank is None or _choose_rank({}, {}, reported) in (None, rank)
        placed = next((self._nodes[known] for known in labels.items() if known in self._nodes), None)
        node = labels.get("node") or own or placed or (reported.get("node") if is_same else None)
        return LogFault(fault.kind, one_line(message, MAX_MESSAGE), rank, node, fault.bad_node, best.line, fault)

    def _take(self, stream: _Stream, labels: dict[str, str], text: str, cues: list[str]) -> None:
        body = text.strip()
        if _TRACEBACK in body:
            stream.indent, stream.head = len(text) - len(text.lstrip()), []
            return
        if _CHAIN.search(body):
            stream.is_chained = True
            return
        is_native = body.startswith("what():")
        is_exception = _NAMED.match(body) is not None
        if stream.indent is not None and not is_native:
            indent = len(text) - len(text.lstrip())
            if not body or indent > stream.indent:
                return
            if indent == stream.indent and (is_exception or _AFTER_TRACEBACK.match(body)):
                is_exception, stream.indent = True, None
        if caused := _CAUSED_BY.match(body):
            is_exception, body, stream.is_chained = True, body[caused.end() :], False
        if is_native:
            inner, body = self.rules.peel(body.removeprefix("what():").strip())
            labels = labels | inner
            body = f"{stream.thrown}: {body}" if stream.thrown else body
        if thrown := _TERMINATE.search(body):
            stream.thrown = thrown[1]
            body = body if "bad_alloc" in body else "terminate called"
        if is_exception or is_native:
            self._take_exception(stream, labels, body)
        elif body:
            self._take_line(stream, labels, body, cues)

    def _take_exception(self, stream: _Stream, labels: dict[str, str], body: str) -> None:
        fault = self.rules.classify(body) or CLASSES["exception"]
        if stream.is_chained and fault.level > 2:  # an earlier exception in the chain is the cause
            fault = CLASSES["report"]
        stream.head, stream.is_chained = [body[:MAX_MESSAGE]], False
        stream.kept = self._keep(fault, self._line, labels, body)

    def _take_line(self, stream: _Stream, labels: dict[str, str], body: str, cues: list[str]) -> None:
        """Take a line that is not an exception: a native message, a report, or a part of the last message."""
        if _SUMMARY.search(body):
            stream.is_summary, stream.head = True, [body]
            self.reported, self._has_summary = self.reported if self._has_summary else {}, True
            return
        if stream.is_summary:
            self.reported = self.rules.locate(body) | self.reported
        elif stream.kept is not None and stream.head and (_MORE.match(body) or stream.head[-1].endswith(":")):
            self._extend(stream.kept, body[:400])
        fault = self.rules.classify(body, cues) if cues else None
        whole = body
        if stream.head:
            if not stream.is_summary:
                whole = " ".join((*stream.head, body))
            stream.head.append(body[:400])
            if len(stream.head) > _MAX_BELOW:
                stream.head, stream.is_summary = [], False
        if fault is not None and fault.level == 0 and self.rules.warnings.search(self._whole[:120]):
            fault = CLASSES["warned"]
        if fault is not None and stream.is_summary and fault.name in ("killed", "fault"):
            first = self._best.get(fault.level)
            body = f"the first process that failed: {body}"
            body = first.message if first is not None and first.fault is fault else body
            fault = fault.model_copy(update={"level": CLASSES["exception"].level})
        if fault is not None:
            self._keep(fault, self._line, labels, whole if fault.level < 3 else body)

    def _extend(self, found: _Found, more: str) -> None:
        """Add a line to the message of an exception, which may show what an exception without a message means."""
        found.message += f" {more}"
        if found.fault.name == "exception" and (fault := self.rules.classify(found.message)) is not None:
            if self._best.get(found.fault.level) is found:
                del self._best[found.fault.level]
            self._keep(fault, found.line, found.labels, found.message)

    def _keep(self, fault: FaultClass, line: int, labels: dict[str, str], message: str) -> _Found | None:
        """Keep the first failure of each level, and return it; a later one of the level may name its rank or node."""
        if fault.name == "ignored":
            return None
        found = _Found(fault, message[: 4 * MAX_MESSAGE], line, labels, self.rules.locate(message))
        if fault.name in _REPORTS:
            known = found.named | labels
            self.reported = self.reported or {name: known[name] for name in _REPORTED_LABELS if name in known}
            if "node" in found.named and len(self._nodes) < MAX_STREAMS:
                ranks = ((name, found.named[name]) for name in ("rank", "task") if name in found.named)
                self._nodes |= dict.fromkeys(ranks, found.named["node"])
        if fault.ends_job:
            self._ended = self._ended or found
        first = self._best.setdefault(fault.level, found)
        if first is not found and first.fault is fault:
            if _WRAPS.match(first.message):
                first = self._best[fault.level] = found
            elif not first.labels and not first.named and fault.level < 3:
                first.labels, first.named = found.labels, found.named
        return found if first is found else None


def read_log(text: str, rules: FaultRules | None = None) -> LogFault | None:
    """Return the root failure in the text of a log; None if no line shows one."""
    return _read(re.split(r"\r\n|\r|\n", text), LogReader(rules))


def read_logs(paths: Iterable[Path], make: Callable[[], LogReader] = LogReader) -> tuple[LogFault, Path] | None:
    """Return the root failure of several logs and its file: the worst of one failure each, the first of equals."""
    found = [(fault, path) for path in paths if (fault := _read(_iterate(path), make())) is not None]
    return min(found, key=lambda pair: pair[0].fault.level, default=None)


def find_rank(line: str) -> int | None:
    """Return the rank that a launcher wrote in front of a line; None if it wrote none."""
    return _choose_rank(shipped_rules().peel(line)[0], {}, {})


def _read(lines: Iterable[str], reader: LogReader) -> LogFault | None:
    for line in lines:
        reader.feed(line)
    return reader.conclude()


def _iterate(path: Path) -> Iterator[str]:
    """Yield the lines of a log, and what a progress bar wrote over as lines of their own; none if it cannot be read."""
    try:
        with open_job_file(path) as file:
            file.seek(max(0, file.seek(0, 2) - MAX_LOG_BYTES))
            while piece := file.readline(MAX_LINE_BYTES):
                yield from piece.decode(errors="replace").rstrip("\r\n").split("\r")
    except (OSError, JobFileError):
        return


def _choose_rank(
    labels: Mapping[str, str], named: Mapping[str, str], reported: Mapping[str, str], is_cause: bool = False
) -> int | None:
    """Return the rank by the strongest sign: a line's label, a launcher's report, the text, a rank of the node.

    The text of a cause counts before a report.
    """
    texts = [(reported, ("rank", "group")), (named, ("rank", "task"))]
    signs = (labels, ("rank", "group", "task")), *(texts[::-1] if is_cause else texts), (reported, ("task",))
    weak = (labels, ("local",)), (named, ("local",)), (reported, ("local",))
    text = next((known[name] for known, names in (*signs, *weak) for name in names if name in known), "")
    return int(text) if text.isdigit() and len(text) < 8 else None
