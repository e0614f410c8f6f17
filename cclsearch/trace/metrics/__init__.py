"""The built-in metrics, entered through the same door as anyone's. Importing this package registers them."""

from cclsearch.trace.metrics import (
    balance,
    bandwidth,
    breakdown,
    chip,
    communication,
    efficiency,
    idle,
    inference,
    kernels,
    memory,
    path,
    quality,
    scaling,
    steps,
)

__all__ = [
    "balance",
    "bandwidth",
    "breakdown",
    "chip",
    "communication",
    "efficiency",
    "idle",
    "inference",
    "kernels",
    "memory",
    "path",
    "quality",
    "scaling",
    "steps",
]
