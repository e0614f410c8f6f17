"""How far traces and what was computed from them may be trusted."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """How far a result may be trusted."""

    OK = "ok"
    PARTIAL = "partial"
    NOT_AVAILABLE = "not_available"


class FileStatus(StrEnum):
    """How much of a trace file could be read."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    NOT_AVAILABLE = "not_available"
