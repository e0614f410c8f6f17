"""Reply to a tool call: a text for the model, and the decision if it made one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cclsearch.core.values import Value
from cclsearch.propose.events import SubmittedConfig


@dataclass(frozen=True)
class Decision:
    """The decision that ends a turn: a submission or a finish."""

    submitted: tuple[SubmittedConfig, ...] = ()
    refused: tuple[str, ...] = ()
    """Reasons why further configurations, beliefs or doubts of the same call are left out."""
    finish: str | None = None
    insight: str = ""
    beliefs: Mapping[str, str] = field(default_factory=dict)
    """Part of the work, or KNOB=VALUE -> how it compares with the closed form: evidence for the surrogate."""
    doubts: tuple[int, ...] = ()
    """Finished trials whose measurement the model doubts."""
    withdraws: tuple[int, ...] = ()
    """Earlier turns whose insight and beliefs the model withdraws."""
    is_revision: bool = False
    """Whether it only changes beliefs, doubts and insights, without a trial."""
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
