"""The built-in metrics, registered like those of plugins. Importing this package registers them."""

from importlib import import_module

MODULES = (
    *("balance", "bandwidth", "breakdown", "chip", "communication", "critical_path", "efficiency", "idle"),
    *(
        "inference",
        "kernels",
        "launches",
        "memory",
        "operators",
        "quality",
        "roofline",
        "scaling",
        "serving",
        "steps",
        "totals",
    ),
)

for _module in MODULES:
    import_module(f"{__name__}.{_module}")
