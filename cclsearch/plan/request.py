"""The user's request, the card that it names, and whether a recording has measured the same work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cclsearch.card.fields import BY_NAME
from cclsearch.card.load import GivenHardware, UnknownFieldError, inspect_card, load_card
from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value
from cclsearch.launch.command import Command
from cclsearch.launch.profile import Profile, load_profile
from cclsearch.plan.target import find_recording
from cclsearch.recording.load import load_recording
from cclsearch.run.spec import SearchLimits
from cclsearch.scoring.objective import Objective
from cclsearch.space.knobs import KNOBS, canonical_name
from cclsearch.tasks.base import task_of


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
    """A function of the caller measures trials, or a command, in so many threads; None: jobs do."""
    command: Command | None = None
    """The command in place of a function."""
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
    """Sampler of the study that proposes the rest beside the LLM; None: the surrogate."""
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
    """Folders of runs, the newest last; those on the same cluster with the same framework set the prior."""
    first: tuple[Config, ...] = ()
    """Configurations to run before the strategy proposes."""
    baseline: str | Mapping[str, Value] | None = None
    """The configuration to compare with, such as `tp=8,pp=1`; a text as the user typed it."""
    knobs: tuple[KnobDeclaration, ...] = ()
    run_id: str | None = None
    log_to: tuple[str, ...] = ()
    """Trackers that follow the search, as `--log-to` names them."""


_FREE = frozenset({"description", "source", "licence", "recording", "nominal"})
"""Fields that do not affect what a trial does."""
MIN_LIKENESS = 0.85
"""A field that no card has is taken for a knob if difflib finds them this alike: fields and knobs share words."""


def load_requested(request: SearchRequest) -> Card:
    """Return the card that the request names; the recording's, completed, if it names only a recording."""
    if request.card is not None:
        return request.card
    if request.recording is not None:
        folder = find_recording(request.recording)
        if Path(request.workload) == folder / "card.yaml":
            return load_recording(folder).card
    profile = load_profile(request.launcher) if request.launcher is not None else None
    return load_workload(request.workload, request.overlays, request.sets, profile, request.recording)


def load_workload(
    workload: str, overlays: Sequence[str], sets: Sequence[str], profile: Profile | None, recording: str | None = None
) -> Card:
    """The card; the profile, or the replayed recording, fills in hardware that it does not state.

    Raises UserError that names each field still missing.
    """
    try:
        return _load_workload(workload, overlays, sets, profile, recording)
    except UnknownFieldError as error:
        known = get_close_matches(canonical_name(error.field), KNOBS, n=1, cutoff=MIN_LIKENESS)
        if not known:
            raise
        raise UserError(
            f"--set: a card has no field {error.field!r}; if you mean the knob {known[0]!r}, limit it with"
            f" `--knob {known[0]}=VALUE`"
        ) from None


def _load_workload(
    workload: str, overlays: Sequence[str], sets: Sequence[str], profile: Profile | None, recording: str | None
) -> Card:
    given = GivenHardware(_list_hardware(profile), f"the profile {profile.name}" if profile is not None else "")
    if profile is None or profile.launcher == "replay":
        report = inspect_card(workload, overlays, sets)
        name = recording or report.values.get("recording")
        if report.open and name is not None:
            recorded = load_recording(find_recording(name))
            given = GivenHardware(
                recorded.card.hardware.model_dump(exclude_none=True), f"the recording {recorded.name}"
            )
    return load_card(workload, overlays, sets, given)


def _list_hardware(profile: Profile | None) -> dict[str, Any]:
    """The hardware that a profile states, as fields of `Hardware`; its rate is at the card's precision."""
    stated = profile.hardware.overrides() if profile is not None else {}
    return stated | ({"peak_flops": {"": stated["peak_flops"]}} if "peak_flops" in stated else {})


def refuse_unlike(request: SearchRequest, recorded: Card, recording: str) -> None:
    """Raise UserError for `--set` and `--overlay` that differ from what was measured."""
    if not request.sets and not request.overlays:
        return
    before = inspect_card(request.workload).values
    asked = inspect_card(request.workload, request.overlays, request.sets).values
    changed = {field: value for field, value in asked.items() if before.get(field) != value and field not in _FREE}
    differs = [
        f"{field} {_show(measured)} (not {_show(value)})"
        for field, value in changed.items()
        if (measured := _value_of(recorded, field)) != value
    ]
    if differs:
        option = " ".join(name for name, given in (("--set", request.sets), ("--overlay", request.overlays)) if given)
        raise UserError(
            f"{option}: the recording {recording!r} was measured with {', '.join(differs)}; leave the change out, or"
            " choose where to run trials (`--launcher NAME`)"
        )


def _value_of(card: Card, field: str) -> Any:
    """The card's value of a field of card files; None if it has none."""
    if card.model is not None and field == "moe":
        return card.model.moe is not None
    task_fields = {each.name: each.target for each in task_of(card).card_fields}
    if field in task_fields:
        return card.work.get(task_fields[field])
    name = BY_NAME[field].target if field in BY_NAME else field
    for part in (card.model and card.model.moe, card.model, card.hardware, card):
        if part is not None and hasattr(part, name):
            return getattr(part, name)
    return card.family if field == "model_family" else None


def _show(value: Any) -> str:
    return "none" if value is None else one_line(str(value), 40)
