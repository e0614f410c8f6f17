"""Families of decoder models by the `model_type` of their config.json; `families.yaml` describes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cclsearch.core.values import Model
from cclsearch.core.yaml_file import read_yaml, validate_mapping

FAMILIES_FILE = Path(__file__).with_name("families.yaml")


class Family(Model):
    """One family as `families.yaml` describes it."""

    like: str = ""
    gated: bool = True
    tied: bool = False
    moe: bool = False
    head_dim: int = 0
    full_every: int = 0
    dense_first: int = 0
    has: dict[str, bool | str] = {}


class Families(Model):
    """`families.yaml`."""

    names: dict[str, tuple[str, ...]]
    switches: dict[str, str]
    known: tuple[tuple[str, ...], ...]
    families: dict[str, Family]
    refused: dict[str, tuple[str, ...]]

    def find(self, name: str) -> Family | None:
        """The family of that `model_type`, or the one that it is like."""
        found = self.families.get(name)
        return self.families[found.like] if found is not None and found.like else found

    def read_names(self) -> frozenset[str]:
        """Settings that are read, or do not change the shape."""
        return frozenset((*self.switches, *(n for names in (*self.names.values(), *self.known) for n in names)))


@cache
def load_families() -> Families:
    """Every family that is known."""
    return validate_mapping(Families, read_yaml(FAMILIES_FILE), str(FAMILIES_FILE))
