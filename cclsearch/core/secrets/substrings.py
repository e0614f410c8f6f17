"""Find which of many byte strings a text contains, in one pass over the text."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

# The pass has a fixed cost: below this, one search per string is faster.
_SHORT = 4096
"""Length of a text in bytes below which each string is searched on its own."""
# The low five bits are the same for both cases of a letter.
_BITS = 31
"""Bits of a byte that the pass compares."""


class Trigrams:
    """The trigrams of a text, folded to 5 bits a byte: the same for its spelling in lower case."""

    def __init__(self, text: bytes) -> None:
        self._seen = _see_trigrams(text) if len(text) >= _SHORT else None

    def find_contained(self, strings: Iterable[bytes], text: bytes) -> list[bytes]:
        """Return the strings that occur in the text, in their order; one without their trigrams is skipped."""
        seen = self._seen
        if seen is not None:
            strings = [string for string in strings if all(seen[code] for code in _codes(string))]
        return [string for string in strings if string in text]


def _see_trigrams(text: bytes) -> bytes:
    """Return whether each trigram occurs in the text, by its code of 15 bits."""
    import numpy as np

    folded: Any = (np.frombuffer(text, np.uint8) & _BITS).astype(np.uint16)
    seen = np.zeros(1 << 15, np.uint8)
    seen[(folded[:-2] << 10) | (folded[1:-1] << 5) | folded[2:]] = 1
    return seen.tobytes()


@functools.lru_cache(maxsize=4096)
def _codes(string: bytes) -> tuple[int, ...]:
    """Return the codes of a string's first trigrams; none if it is shorter than three bytes."""
    folded = [byte & _BITS for byte in string[:12]]
    return tuple(a << 10 | b << 5 | c for a, b, c in zip(folded, folded[1:], folded[2:], strict=False))
