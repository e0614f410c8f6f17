"""Decides at each step whether the LLM or the fallback proposes."""
