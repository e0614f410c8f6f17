"""What the user asks for, before anything is looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.values import Config, Value
from cclsearch.run.spec import SearchLimits
from cclsearch.scoring.objective import Objective


@dataclass(frozen=True)
class SearchRequest:
    """One search as requested on the command line or in a nightly file."""

    workload: str
    limits: SearchLimits
    overlays: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    launcher: str | None = None
    may_simulate: bool = True
    """Whether trials are simulated if nothing else applies; else the launcher must be named."""
    card: Card | None = None
    """The card, if it is loaded already; `workload` is then only its name."""
    threads: int | None = None
    """A function of the caller measures trials, in so many threads; None: jobs do."""
    in_allocation: bool = False
    """Run trials as steps of the Slurm allocation that this process is in."""
    recording: str | None = None
    framework: str | None = None
    objective: str | Objective | None = None
    """The name of a file in `objectives/` or of a metric, or a loaded objective; None for the task's own."""
    constraints: tuple[str, ...] = ()
    """Constraints in addition to the objective's, such as `peak_memory_gib <= 70`."""
    strategy: str | None = None
    """With an LLM: `hybrid` (None) or `llm`."""
    sampler: str | None = None
    """The sampler of the study that proposes what no LLM does; None: the surrogate."""
    llm: str | None = None
    llm_options: Mapping[str, Value | None] = field(default_factory=dict)
    seed: int = 0
    use_fewer: bool = False
    """Also search configurations on fewer accelerators than the card has."""
    learn_from: tuple[str, ...] = ()
    """Folders of runs of the same work, of recordings of it, or of runs of other work with the same framework."""
    learn_from_comparable: bool = False
    """Learn from the times of all comparable runs among `earlier_runs` too (`--learn-from auto`)."""
    earlier_runs: tuple[str, ...] = ()
    """Folders of runs, the newest last, of which those on the same cluster with the same framework set the prior."""
    first: tuple[Config, ...] = ()
    """Configurations to run before the strategy proposes."""
    baseline: str | None = None
    """The configuration to compare with, such as `tp=8,pp=1`, as the user typed it."""
    knobs: tuple[KnobDeclaration, ...] = ()
    run_id: str | None = None
    log_to: tuple[str, ...] = ()
    """Trackers that follow the search, as `--log-to` names them."""
