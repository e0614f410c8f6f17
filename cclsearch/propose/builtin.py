"""Imports the strategies that come with the engine, so that they register themselves."""

from cclsearch.propose import default, front, simple  # noqa: F401
