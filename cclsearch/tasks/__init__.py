"""Kinds of workload. A task owns what the engine must know about one kind."""
