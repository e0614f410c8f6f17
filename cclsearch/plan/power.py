"""Whether a search may set the power limits and clocks of its devices: knobs that change machines, not only trials."""

from __future__ import annotations

from collections.abc import Sequence

from cclsearch.card.model import Card, KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.core.values import Value
from cclsearch.launch.profile import Profile
from cclsearch.space.framework import Framework
from cclsearch.space.table import Knob

DEVICES = {"power_cap_w": ("gpu", "cpu"), "gpu_clock_mhz": ("gpu",)}
"""Knob -> the kinds of devices that have it."""
UNCHANGED = "default"
"""The value that leaves the devices as they are."""
MAX_SETTING = 100_000
"""W or MHz that no device has."""


def list_power_knobs(profile: Profile) -> tuple[KnobDeclaration, ...]:
    """Return the knobs that a user may name because the profile allows them."""
    names = DEVICES if profile.allow_power_caps else ()
    return tuple(KnobDeclaration(name=name, choices=(UNCHANGED,)) for name in names)


def check_power_knobs(card: Card, framework: Framework, knobs: Sequence[Knob], profile: Profile) -> None:
    """Raise UserError unless profile, framework and devices allow the space's knobs that set power limits or clocks."""
    for knob in knobs:
        if knob.name not in DEVICES:
            continue
        kind = card.hardware.chip.kind
        if not profile.allow_power_caps:
            raise UserError(
                f"knob {knob.name!r} changes the devices, and the profile {profile.name!r} does not allow it: add"
                " `allow_power_caps: true` to it if trials have the devices to themselves and may set them"
            )
        if not framework.caps_power:
            raise UserError(f"knob {knob.name!r}: the run script of {framework.name!r} does not set it")
        if kind not in DEVICES[knob.name]:
            raise UserError(
                f"knob {knob.name!r}: {card.hardware.accelerator} is not a {' or '.join(DEVICES[knob.name])}"
            )
        if wrong := [choice for choice in knob.choices if not _is_setting(choice)]:
            raise UserError(
                f"knob {knob.name!r} takes {UNCHANGED} or whole numbers from 1 to {MAX_SETTING}, not {wrong[0]!r}"
            )


def _is_setting(choice: Value) -> bool:
    if isinstance(choice, bool) or not isinstance(choice, int):
        return choice == UNCHANGED
    return 1 <= choice <= MAX_SETTING
