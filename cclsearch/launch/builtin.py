"""Imports the built-in launchers, so that they register themselves."""

from cclsearch.launch import in_process, local, replay, simulate  # noqa: F401
from cclsearch.launch.slurm import factory  # noqa: F401
from cclsearch.launch.tpu_vm import launcher as tpu_vm  # noqa: F401
