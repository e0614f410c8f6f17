"""Knobs of a framework file: their choices for a card, what they write, and where they have an effect."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from cclsearch.card.model import Card
from cclsearch.core.values import Model, Value
from cclsearch.space.knobs import meaning_of
from cclsearch.space.numbers import check_number, find_number, list_divisors
from cclsearch.space.table import Knob

NumberName = Annotated[str, AfterValidator(check_number)]
"""A name in `NUMBERS`, or in the numbers of a task."""


class Divisors(Model):
    """Choices computed from the card: every divisor of one of its numbers."""

    divisors_of: NumberName
    if_fewer: tuple[NumberName, ...] = ()
    """Further numbers whose divisors are choices if a search may leave accelerators idle: degrees then need not divide
    the number of accelerators.
    """
    also: tuple[int, ...] = ()
    """Further choices, of every card."""
    most: int | None = Field(default=None, ge=1)

    def choices(self, card: Card, *, use_fewer: bool = False) -> tuple[int, ...]:
        """The divisors in ascending order, up to `most`; those of `if_fewer` up to the number of accelerators."""
        divisors = {*list_divisors(find_number(card, self.divisors_of)), *self.also}
        for name in self.if_fewer if use_fewer else ():
            more = list_divisors(find_number(card, name))
            divisors.update(divisor for divisor in more if divisor <= card.hardware.num_accelerators)
        return tuple(divisor for divisor in sorted(divisors) if self.most is None or divisor <= self.most)


class FrameworkKnob(Model):
    """One knob of a framework."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,40}$")
    choices: Divisors | tuple[Value, ...]
    description: str = ""
    env: str | None = Field(default=None, pattern=r"^[A-Z][A-Z0-9_]{1,60}$")
    """Environment variable that the run script sets to the knob's value (`NCCL_ALGO`)."""
    writes: dict[str, str] = {}
    """Choice -> text that it writes into that variable, if not itself. Texts of several knobs are joined by blanks."""
    moe_only: bool = False
    """Whether the knob exists only for models with experts."""
    if_at_least: dict[NumberName, int] = {}
    """Number of the card -> its minimum for the knob to be in a space by default; below, the knob is optional."""
    numerics: bool = False
    """Whether its values change the numbers: all but the first need NAME=VALUE in a card's `alternative_precisions`."""
    range: tuple[int | float, int | float] | None = None
    """Least and most of the numbers that a search may add to the choices."""
    adds: dict[str, str] = {}
    """Choice -> words that the run script adds to the framework's options (`options` of its input)."""
    where: dict[str, tuple[Value, ...]] = {}
    """Other knob -> its values with which this knob has an effect; elsewhere its first choice stands for all."""
    chips: tuple[str, ...] = ()
    """Accelerators that can have choices beside the first, by the start of their names; any if empty."""
    lever: bool = False
    """Whether a search opens the knob by itself on its best layouts. The first choice is the default until then."""
    effect: dict[str, tuple[float, float]] = {}
    """Choice -> its step time and its peak memory relative to the first choice's, as published; others are unknown."""
    source: str = ""
    """Sources of the option, its default and its effect."""

    @property
    def first(self) -> Value:
        """The choice of a configuration without the knob."""
        return 1 if isinstance(self.choices, Divisors) else self.choices[0]

    def writes_into(self, env: str, flag: str = "") -> bool:
        """Whether the knob sets that variable, or that flag in it."""
        return self.env == env and (not flag or any(flag in text for text in self.writes.values()))

    def suits(self, card: Card) -> bool:
        """Whether a space of this card can have the knob."""
        return not self.moe_only or (card.model is not None and card.model.moe is not None)

    def is_offered(self, card: Card) -> bool:
        """Whether spaces of this card have the knob by default."""
        return self.suits(card) and all(find_number(card, name) >= least for name, least in self.if_at_least.items())

    def resolve(self, card: Card, *, use_fewer: bool = False) -> Knob:
        """The knob with its choices for that card."""
        given = self.choices
        choices = given.choices(card, use_fewer=use_fewer) if isinstance(given, Divisors) else given
        has_all = not self.chips or card.hardware.chip.name.startswith(self.chips)
        others = (c for c in choices[1:] if has_all and (not self.numerics or card.allows(self.name, c)))
        return Knob(self.name, (*choices[:1], *others), self.description or meaning_of(self.name).words)
