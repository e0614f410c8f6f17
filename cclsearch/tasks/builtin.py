"""Registers the tasks of this project."""

from cclsearch.tasks.inference import task as inference
from cclsearch.tasks.serving import task as serving
from cclsearch.tasks.training import task as training

__all__ = ["inference", "serving", "training"]
