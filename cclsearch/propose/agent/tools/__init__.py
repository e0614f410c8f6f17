"""Describes the LLM's tools and answers its calls."""
