"""Prices of models: what the user states, and what the `genai-prices` package lists with its date."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from cclsearch.core.errors import UserError
from cclsearch.core.numbers import read_amount
from cclsearch.core.values import Model

_PRICED = Decimal(1000)


class Price(Model):
    """US dollars per million tokens."""

    model: str
    """Pattern for `protocol:model`, with `*` for any part; the first match counts."""
    input_usd: float = Field(ge=0)
    output_usd: float = Field(ge=0)
    cache_read_usd: float | None = Field(default=None, ge=0)
    """None: the price of input."""
    cache_write_usd: float | None = Field(default=None, ge=0)
    source: str = ""
    """Where the price is from, and its date."""
    is_assumed: bool = False
    """Whether it is the dearest price of the model's family, because the list does not name the model."""

    def describe(self) -> str:
        """`$4 and $20 for a million tokens of input and output (genai-prices 0.2.3)`."""
        if not self.input_usd and not self.output_usd:
            return f"free: {self.source}"
        assumed = f", assumed: the dearest of its family, {self.model}" if self.is_assumed else ""
        what = f"${self.input_usd:g} and ${self.output_usd:g} for a million tokens of input and output"
        return f"{what} ({self.source}{assumed})"


class PriceList(Model):
    """A price list of the user's, and its date."""

    as_of: str
    note: str = ""
    prices: tuple[Price, ...]


def parse_price(text: str) -> Price:
    """Return the price of `--llm-price INPUT,OUTPUT`, in US dollars for a million tokens."""
    try:
        given = [read_amount(part, 0.0, 1e6) for part in text.split(",")]
        if len(given) == 2:
            return Price(model="*", input_usd=given[0], output_usd=given[1], source="--llm-price")
    except ValueError:
        pass
    raise UserError(f"--llm-price must be INPUT,OUTPUT in US dollars for a million tokens, such as 4,20, not {text!r}")


@lru_cache
def load_prices(path: Path) -> PriceList:
    """The price list in that file; raises UserError that names the file and the field."""
    try:
        return PriceList.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"price list {str(path)!r} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"price list {str(path)!r}, field {where!r}: {first['msg']}") from None


@lru_cache(maxsize=64)
def find_listed_price(protocol: str, model: str) -> Price | None:
    """The price in `genai-prices`; of a model that it does not name, the dearest of the family.

    The family has the longest beginning of the name in common, in whole words.
    """
    from genai_prices.data_snapshot import get_snapshot

    known = next((provider for provider in get_snapshot().providers if provider.id == protocol), None)
    if known is None:
        return None
    found = known.find_model(model)
    if found is not None and (price := _read_library(protocol, found.id)):
        return price
    family = _list_family(model, [other.id for other in known.models])
    prices = [price for other in family if (price := _read_library(protocol, other))]
    if not prices:
        return None
    dearest = max(prices, key=lambda price: (price.output_usd, price.input_usd))
    return dearest.model_copy(update={"is_assumed": True})


def _list_family(model: str, known: list[str]) -> list[str]:
    """The models whose names share the longest beginning with that name, in whole words, of at least one word."""
    shared = {other: _count_shared(_words(model), _words(other)) for other in known}
    longest = max(shared.values(), default=0)
    return [other for other, count in shared.items() if count == longest] if longest else []


def _count_shared(one: list[str], other: list[str]) -> int:
    """Words at the beginning of both lists that are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _words(name: str) -> list[str]:
    return re.split(r"[-._/:@]", name.lower())


def _read_library(protocol: str, model: str) -> Price | None:
    """The library's price for requests of ordinary length."""
    import importlib.metadata

    import genai_prices

    def usd(**tokens: int) -> float:
        usage = genai_prices.Usage(**tokens)
        return float(genai_prices.calc_price(usage, model, provider_id=protocol).total_price * _PRICED)

    try:
        input_usd, output_usd = usd(input_tokens=1000), usd(output_tokens=1000)
        read = usd(input_tokens=1000, cache_read_tokens=1000)
        write = usd(input_tokens=1000, cache_write_tokens=1000)
    except (LookupError, ValueError, TypeError):
        return None
    if not input_usd or not output_usd:
        return None  # a model for pictures or speech
    if protocol == "anthropic":
        write = 2 * input_usd  # of the marks for an hour, which the library counts apart
    source = f"genai-prices {importlib.metadata.version('genai-prices')}"
    return Price(
        model=f"{protocol}:{model}",
        input_usd=input_usd,
        output_usd=output_usd,
        cache_read_usd=read,
        cache_write_usd=max(write, input_usd),
        source=source,
    )
