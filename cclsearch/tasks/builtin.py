"""Registers the tasks of this project."""

from cclsearch.tasks.training import task as task
