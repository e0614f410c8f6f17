"""Levels of trust in traces and in the figures computed from them."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Trust in a result."""

    OK = "ok"
    PARTIAL = "partial"
    NOT_AVAILABLE = "not_available"


class FileStatus(StrEnum):
    """Part of a trace file that could be read."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    NOT_AVAILABLE = "not_available"
