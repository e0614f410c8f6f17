"""The built-in metrics, entered through the same door as anyone's. Importing this package registers them."""

from importlib import import_module

MODULES = (
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
)

for _module in MODULES:
    import_module(f"{__name__}.{_module}")
