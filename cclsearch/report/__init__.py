"""Output for people: terminal tables, charts, one HTML page."""
