"""The cost of requests and turns in tokens, money and seconds, and the limits on it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from cclsearch.core.values import Model
from cclsearch.propose.agent.providers.prices import Price as Price
from cclsearch.propose.agent.providers.types import CompletionRequest, Usage

# Text of many numbers has more tokens than prose: 2.5 bytes each were seen.
MAX_PER_BYTE = 0.5
"""Most tokens that a byte of a request may have."""


class Cost(Model):
    """The cost of one turn, or of all turns so far."""

    usage: Usage = Usage()
    usd: float | None = 0.0
    """None if the model's price is unknown."""
    seconds: float = 0.0
    requests: int = 0
    is_assumed: bool = False
    """Whether the dollars rest on an assumed price, or on an assumed use of a request that was not answered."""

    def __add__(self, other: Cost) -> Cost:
        usd = None if self.usd is None or other.usd is None else self.usd + other.usd
        return Cost(
            usage=self.usage + other.usage,
            usd=usd,
            seconds=self.seconds + other.seconds,
            requests=self.requests + other.requests,
            is_assumed=self.is_assumed or other.is_assumed,
        )

    def describe(self) -> str:
        """`12,300 tokens, $0.0410, 12.3 s`."""
        return f"{self.describe_spent()}, {self.seconds:.1f} s"

    def describe_spent(self) -> str:
        """`12,300 tokens, $0.0410`."""
        assumed = " (assumed)" if self.is_assumed else ""
        usd = "price unknown" if self.usd is None else f"${self.usd:.4f}{assumed}"
        estimated = " (estimated)" if self.usage.is_estimated else ""
        return f"{self.usage.total:,} tokens{estimated}, {usd}"


def cost_of(usage: Usage, price: Price | None) -> Cost:
    """The cost of one request with that usage; its dollars are None if the price is unknown."""
    if price is None:
        return Cost(usage=usage, usd=None, requests=1)
    read = price.input_usd if price.cache_read_usd is None else price.cache_read_usd
    write = price.input_usd if price.cache_write_usd is None else price.cache_write_usd
    usd = (
        usage.input_tokens * price.input_usd
        + usage.output_tokens * price.output_usd
        + usage.cache_read_tokens * read
        + usage.cache_write_tokens * write
    ) / 1e6
    return Cost(usage=usage, usd=usd, requests=1, is_assumed=price.is_assumed)


def largest_cost(request: CompletionRequest, price: Price | None) -> Cost:
    """The most that a request can cost: all its bytes as tokens that are written to a cache, and the whole output."""
    num_input = int((request.num_bytes + request.num_kept_bytes) * MAX_PER_BYTE) + 1
    cached = price is not None and (price.cache_write_usd or 0.0) > price.input_usd
    inputs: dict[str, Any] = {"cache_write_tokens" if cached else "input_tokens": num_input}
    usage = Usage(output_tokens=request.max_output_tokens, is_estimated=True, **inputs)
    return cost_of(usage, price).model_copy(update={"is_assumed": True})


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

    def fit(self, request: CompletionRequest, spent: Cost, price: Price | None, min_output: int) -> CompletionRequest:
        """Return the request with as many output tokens as the money left pays for in any case.

        Raises ValueError, which says so, if that is less than `min_output`.
        """
        if self.max_usd is None or price is None or spent.usd is None:
            return request
        left = self.max_usd - spent.usd
        no_output = largest_cost(request.model_copy(update={"max_output_tokens": 0}), price).usd or 0.0
        affordable = request.max_output_tokens
        if price.output_usd:
            affordable = min(affordable, int((left - no_output) * 1e6 / price.output_usd))
        if affordable < min(min_output, request.max_output_tokens) or left <= 0:
            rest = "and the next request may cost more than is left"
            raise ValueError(f"${spent.usd:.4f} of ${self.max_usd:g} is spent, {rest}")
        return request.model_copy(update={"max_output_tokens": affordable})
