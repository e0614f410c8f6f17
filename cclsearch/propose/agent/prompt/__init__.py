"""Writes what the LLM reads before it decides."""
