"""Reads what earlier turns left: events, insights, evidence and records on disk."""
