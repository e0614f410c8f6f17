"""The cost of turns in tokens, money and seconds, and the limits on it."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from cclsearch.core.errors import UserError
from cclsearch.core.values import Model
from cclsearch.propose.agent.providers.types import Usage

PRICES_FILE = Path(__file__).with_name("prices.yaml")


class Price(Model):
    """US dollars per million tokens."""

    model: str
    """Pattern for `protocol:model`, with `*` for any part; the first match counts."""
    input_usd: float = Field(ge=0)
    output_usd: float = Field(ge=0)
    cache_read_usd: float | None = Field(default=None, ge=0)
    """None: the price of input."""
    cache_write_usd: float | None = Field(default=None, ge=0)


class Prices(Model):
    """A price list and its date."""

    as_of: str
    note: str = ""
    prices: tuple[Price, ...]

    def find(self, name: str) -> Price | None:
        """The price of `protocol:model`; None if the list does not contain it."""
        return next((price for price in self.prices if fnmatchcase(name, price.model)), None)


@lru_cache
def load_prices(path: Path = PRICES_FILE) -> Prices:
    """The price list; raises UserError that names the file and the field."""
    try:
        return Prices.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"price list {str(path)!r} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"price list {str(path)!r}, field {where!r}: {first['msg']}") from None


def prices_path() -> Path:
    """The price list in use: `CCL_SEARCH_PRICES`, or the shipped one."""
    given = os.environ.get("CCL_SEARCH_PRICES")
    return Path(given) if given else PRICES_FILE


class Cost(Model):
    """The cost of one turn, or of all turns so far."""

    usage: Usage = Usage()
    usd: float | None = 0.0
    """None if the model's price is unknown."""
    seconds: float = 0.0
    requests: int = 0

    def __add__(self, other: Cost) -> Cost:
        usd = None if self.usd is None or other.usd is None else self.usd + other.usd
        return Cost(
            usage=self.usage + other.usage,
            usd=usd,
            seconds=self.seconds + other.seconds,
            requests=self.requests + other.requests,
        )

    def describe(self) -> str:
        """`12,300 tokens, $0.0410, 12.3 s`."""
        return f"{self.describe_spent()}, {self.seconds:.1f} s"

    def describe_spent(self) -> str:
        """`12,300 tokens, $0.0410`."""
        usd = "price unknown" if self.usd is None else f"${self.usd:.4f}"
        estimated = " (estimated)" if self.usage.is_estimated else ""
        return f"{self.usage.total:,} tokens{estimated}, {usd}"


def price_usage(usage: Usage, price: Price | None) -> float | None:
    """Price of these tokens in US dollars; None if the price is unknown."""
    if price is None:
        return None
    read = price.input_usd if price.cache_read_usd is None else price.cache_read_usd
    write = price.input_usd if price.cache_write_usd is None else price.cache_write_usd
    return (
        usage.input_tokens * price.input_usd
        + usage.output_tokens * price.output_usd
        + usage.cache_read_tokens * read
        + usage.cache_write_tokens * write
    ) / 1e6


class LlmLimits(Model):
    """`--max-tokens` and `--max-usd`, for the whole run; None for no limit."""

    max_tokens: int | None = Field(default=None, ge=1)
    max_usd: float | None = Field(default=None, gt=0)

    def reached(self, spent: Cost) -> str | None:
        """Return the limit that is reached, in words; None if none is."""
        if self.max_tokens is not None and spent.usage.total >= self.max_tokens:
            return f"{spent.usage.total:,} of {self.max_tokens:,} tokens are used"
        if self.max_usd is not None and spent.usd is not None and spent.usd >= self.max_usd:
            return f"${spent.usd:.4f} of ${self.max_usd:g} is spent"
        return None
