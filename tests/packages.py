"""Packages that a test needs, found without importing them: collecting tests imports neither torch nor JAX."""

from __future__ import annotations

import importlib.util

import pytest


def needs(package: str, how: str = "make test installs it") -> pytest.MarkDecorator:
    """Return the mark that skips tests without the package, and says how to get it."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: {how}")
