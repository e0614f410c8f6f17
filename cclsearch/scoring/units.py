"""Units that people write after a number: converted into the unit that a metric is measured in, or required."""

from __future__ import annotations

from cclsearch.core.text import guess_name

_BYTES = {"B": 1.0, **{f"{p}B": 1e3**n for n, p in enumerate("kMGT", 1)}}
_BYTES |= {f"{p}iB": 1024.0**n for n, p in enumerate("KMGT", 1)}
_PREFIXED = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
FAMILIES: tuple[dict[str, float], ...] = (
    {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0},
    _BYTES,
    *({f"{name}/{per}": factor for name, factor in _BYTES.items()} for per in ("s", "step")),
    *({f"{prefix}{unit}": factor for prefix, factor in _PREFIXED.items()} for unit in ("FLOP/s", "FLOP", "J", "W")),
    {"fraction": 1.0, "%": 0.01},
)
"""Units of one quantity -> their factors."""
_STATED = {"s": "_s", "GiB": "_gib", "W": "_w", "J": "_j", "fraction": ""}
"""Unit -> end of the names that state it; a fraction needs no unit, as one above 1 is refused."""


def convert_bound(bound: float, given: str | None, metric: str, unit: str | None) -> float:
    """The bound in the unit of the metric; raises ValueError if `given` is another quantity, or one is needed."""
    family = next((family for family in FAMILIES if unit in family), None)
    if given is None:
        if family is not None and not metric.endswith(_STATED.get(str(unit), "\n")):
            raise ValueError(f"{metric} needs a unit after the number: one of {', '.join(family)}")
        if unit == "fraction" and bound > 1:
            raise ValueError(f"{metric} is a share: write {bound:g} % if that means {bound / 100:g}")
        return bound
    if given == unit or unit is None:
        return bound
    if family is None or given not in family:
        raise ValueError(f"{metric} is measured in {unit!r}, not in {given!r}{guess_name(given, family or ())}")
    return bound * family[given] / family[str(unit)]
