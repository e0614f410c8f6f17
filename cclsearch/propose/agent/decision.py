"""Reply to a tool call: a text for the model, and the decision if it made one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cclsearch.core.values import Value
from cclsearch.propose.events import Correction, SubmittedConfig


@dataclass(frozen=True)
class Decision:
    """The decision that ends a turn: a submission or a finish."""

    submitted: tuple[SubmittedConfig, ...] = ()
    refused: tuple[str, ...] = ()
    """Reasons why further configurations, corrections or doubts of the same call are left out."""
    finish: str | None = None
    bet: str = ""
    """Reason to end the search, unless the submitted rival beats the best."""
    insight: str = ""
    corrections: tuple[Correction, ...] = ()
    doubts: tuple[int, ...] = ()
    """Finished trials whose measurement the model doubts."""
    memory_crashes: tuple[int, ...] = ()
    """Crashed trials that the model thinks were out of memory."""
    withdraws: tuple[int, ...] = ()
    """Earlier turns whose insight and corrections the model withdraws."""
    is_revision: bool = False
    """Whether it only changes corrections, doubts and insights, without a trial."""
    program: str | None = None
    """Source of the policy program that chose the submission."""
    adds: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Additions to the search space, instead of a submission."""
    why: str = ""
    """Reason for the additions."""


@dataclass(frozen=True)
class ToolReply:
    """The reply to one call."""

    text: str
    fault: str = ""
    """Short name of the mistake (`duplicate`, `illegal`, `malformed`, ...); empty if there was none."""
    decision: Decision | None = None
