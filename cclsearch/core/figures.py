"""Types of the figures that a job reports: numbers of JSON, never a truth value or a text in place of one."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, Strict


def _take_whole(value: Any) -> Any:
    """The value, a whole float as an int: scripts write 1.0e9 bytes."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[float, Strict()]
"""Any number; also one that is not finite, which its reader leaves out or explains."""
Count = Annotated[int, Strict(), BeforeValidator(_take_whole), Field(ge=0, lt=2**63)]
"""A whole number from 0."""
PositiveCount = Annotated[int, Strict(), BeforeValidator(_take_whole), Field(ge=1, lt=2**63)]
Seconds = Annotated[float, Strict(), Field(ge=1e-9, le=1e9)]
"""A measured duration: the clocks have nanoseconds, and 1e9 s are 30 years."""
TimeLimit = Annotated[float, Strict(), Field(gt=0)]
"""Seconds that a job may take; infinite without a limit."""
Joules = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
