"""The hardware of a search: the card's, overridden by the profile's, and whether knobs may set its power."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from cclsearch.card.check import OF_UNKNOWN
from cclsearch.card.groups import fill_from_groups, read_groups
from cclsearch.card.hardware import find_candidates, find_usual, hint_accelerator, match_accelerator
from cclsearch.card.model import Card, Hardware, KnobDeclaration
from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import Config, Value
from cclsearch.launch.profile import Profile
from cclsearch.network.matrix import LinkMatrix
from cclsearch.space.framework import Framework
from cclsearch.space.table import Knob

_OF_CHIP = (
    "peak_flops",
    "memory_gb_per_s",
    "scale_up_domain",
    "scale_up_gbps",
    "scale_out_gbps",
    "torus",
    "host_cores",
    "kernel_tables",
)
"""Fields that a card states of its own accelerator; wrong for another one."""


def resolve_hardware(card: Card, profile: Profile) -> tuple[Hardware, tuple[str, ...]]:
    """The card's hardware with the profile's values, and a note on each value that was looked up.

    Raises UserError if the profile names an unknown accelerator without its numbers.
    """
    stated = _apply_groups(profile)
    if "peak_flops" in stated:
        stated["peak_flops"] = Config({card.precision or "bf16": stated["peak_flops"]})
    looked_up, notes = _look_up(card.hardware, stated, profile)
    hardware = card.hardware.model_copy(update=looked_up | stated | _key(stated))
    on_cpu = hardware.chip.kind == "cpu"
    if profile.launcher == "local" and hardware.host_cores is None and on_cpu:
        hardware = hardware.model_copy(update={"host_cores": os.cpu_count()})
    if hardware.links is not None:
        notes = (*notes, _describe_links(hardware, hardware.links, profile))
    return Hardware.model_validate(hardware.model_dump()), notes


def _apply_groups(profile: Profile) -> dict[str, Any]:
    """The fields that the profile sets: with its groups, those that follow; without, the card's groups do not count if
    it names other hardware."""
    stated, where = profile.hardware.overrides(), f"{profile.source or profile.name}: hardware"
    if "groups" in stated:
        groups = read_groups(stated.pop("groups"), where)
        return stated | fill_from_groups(groups, stated, where) | {"groups": groups}
    return stated | ({"groups": ()} if {"accelerator", "num_accelerators"} & set(stated) else {})


def _describe_links(hardware: Hardware, links: LinkMatrix, profile: Profile) -> str:
    """Say that measured links count; UserError if they are of fewer places than there are accelerators."""
    if links.num_places < hardware.num_accelerators:
        raise UserError(
            f"the links of profile {profile.name} have {links.num_places} places, but there are"
            f" {hardware.num_accelerators} accelerators: measure them with `ccl-search links measure --launcher"
            f" {profile.name} --ranks {hardware.num_accelerators}`, or remove {profile.name}.links.csv"
        )
    return f"profile {profile.name}: measured links instead of two bandwidths: {links.describe()}"


def _key(stated: dict[str, Any]) -> dict[str, Any]:
    """The accelerator's key in the catalogue in place of its alias."""
    name = stated.get("accelerator")
    found = (match_accelerator(name, stated.get("memory_gib")) or find_usual(name)) if name is not None else None
    return {} if found is None else {"accelerator": found.name}


def _look_up(hardware: Hardware, stated: dict[str, Any], profile: Profile) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the changes for another accelerator: the card's own figures are dropped, memory is the catalogue's."""
    name = stated.get("accelerator")
    if name is None:
        return {}, ()
    if not find_candidates(name):
        numbers = [{"memory_gb": "memory_gib"}.get(field, field) for field in OF_UNKNOWN]
        missing = [field for field in numbers if field not in stated]
        if missing and name != hardware.accelerator:
            unknown = f"{name!r} is not a known accelerator{hint_accelerator(name)}"
            where = f"{profile.source or profile.name}: hardware.accelerator: {one_line(unknown, 200)}"
            raise UserError(f"{where}: add {', '.join(f'{field}: N' for field in missing)} to `hardware`")
    key = _key(stated).get("accelerator", name)
    if key == hardware.accelerator:
        return {}, ()
    changed: dict[str, Any] = {**dict.fromkeys(_OF_CHIP), "nominal": False}
    usual = find_usual(name)
    if usual is None:
        return changed, ()
    changed["scale_up_domain"] = usual.scale_up_domain
    if "memory_gib" in stated:
        return changed, ()
    size = usual.sizes_gib[0]
    note = f"profile {profile.name}: {usual.name} with {size:g} GiB, from the catalogue of accelerators"
    return changed | {"memory_gib": size}, (note,)


DEVICES = {"power_cap_w": ("gpu", "cpu"), "gpu_clock_mhz": ("gpu",)}
"""Knob -> the kinds of devices that have it."""
UNCHANGED = "default"
"""The value that leaves the devices as they are."""
MAX_SETTING = 100_000
"""Upper limit of a setting in W or MHz; no device has more."""


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
