"""Imports the strategies that come with the engine, so that they register themselves."""

from cclsearch.propose import default, simple  # noqa: F401
