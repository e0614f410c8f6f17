"""Imports the strategies that come with the engine, so that they register themselves."""

from cclsearch.propose import default, front, peers, simple  # noqa: F401
