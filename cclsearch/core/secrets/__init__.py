"""Secrets in text: their names, formats and values, and how they are masked."""
