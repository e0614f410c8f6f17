"""Kinds of workload: each subpackage contains what the engine knows about one kind."""
