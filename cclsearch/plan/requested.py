"""The card that a search asks for, and whether a recording can honour it: its measurements have one model and work."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cclsearch.card.load import GivenHardware, UnknownFieldError, inspect_card, load_card
from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.launch.profile import Profile, load_profile
from cclsearch.plan.request import SearchRequest
from cclsearch.plan.target import find_recording
from cclsearch.recording.load import load_recording
from cclsearch.space.knobs import KNOBS, canonical_name
from cclsearch.tasks.base import task_of

_FREE = frozenset({"description", "source", "licence", "recording", "nominal"})
"""Fields that say nothing about what a trial does."""
_HARDWARE = {"total_count": "num_accelerators", "count_per_node": "accelerators_per_node", "memory_gb": "memory_gib"}
"""Field of a card's file -> its name in `Card.hardware`, if that differs."""
MIN_LIKENESS = 0.85
"""A field that no card has is taken for a knob if difflib finds them this alike: fields and knobs share words."""
_CARD = {"model_family": "family"}


def load_requested(request: SearchRequest) -> Card:
    """Return the card that the request names; that of the recording, completed, if it names only a recording."""
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
    """The card; hardware that it does not state is the profile's, or that of the recording that is replayed.

    Raises UserError that names what is still missing.
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
    """Raise UserError for `--set` and `--overlay` that ask for something else than what was measured."""
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
    keys = {each.name: each.key or each.name for each in task_of(card).card_fields}
    if field in keys:
        return card.work.get(keys[field])
    parts = ((card.model and card.model.moe, field), (card.model, field), (card.hardware, _HARDWARE.get(field, field)))
    for part, name in (*parts, (card, _CARD.get(field, field))):
        if part is not None and hasattr(part, name):
            return getattr(part, name)
    return None


def _show(value: Any) -> str:
    return "none" if value is None else one_line(str(value), 40)
