"""A local server that speaks both provider protocols, and players that see only the requests."""
