"""ccl-search: finds the fastest way to split LLM training over many accelerators."""

__version__ = "0.1.0"
