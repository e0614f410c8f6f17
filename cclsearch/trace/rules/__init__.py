"""Rule tables kept as data."""
