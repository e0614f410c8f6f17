"""The local launcher's own fields of a profile."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from cclsearch.core.values import Model
from cclsearch.launch.environment import check_passed


class LocalSettings(Model):
    """The `local` launcher's own fields of a profile."""

    python: str | None = None
    """Interpreter of the run scripts; None: the one that runs the search."""
    # Forked ranks share one import of torch.
    fork_ranks: bool = True
    """Let a script that supports it fork its own ranks instead of torchrun."""
    max_parallel: int = Field(default=1, ge=1)
    """Trials at a time: several disturb each other's timing unless they share no resources."""
    poll_interval_s: float = Field(default=0.1, gt=0)
    network_namespaces: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,60}$")], ...] = ()
    """Namespaces (`ip netns`), each used as a node with `accelerators_per_node` ranks; needs root."""
    namespaces_per_node: int = Field(default=1, ge=1)
    """Namespaces that are one node together, in the order above: as many as its ranks if each is one device."""
    pass_environment: tuple[str, ...] = ()
    """Variables, or PREFIX_*, that jobs inherit besides those of `inherited.yaml`; a secret only by its exact name."""

    @field_validator("pass_environment")
    @classmethod
    def _check_passed(cls, opted: tuple[str, ...]) -> tuple[str, ...]:
        check_passed(opted)
        return opted
