"""ccl-search: finds the fastest configuration for LLM training on many accelerators."""

__version__ = "0.3.0"
