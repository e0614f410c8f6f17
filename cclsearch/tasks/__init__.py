"""Kinds of workload: each subpackage contains the engine's knowledge of one kind."""
