"""Decides for each trial whether the LLM or the fallback proposes."""
