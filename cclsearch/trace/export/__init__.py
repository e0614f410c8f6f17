"""Traces for other tools."""
