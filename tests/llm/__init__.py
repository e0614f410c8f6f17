"""A provider stand-in: a local server with both wire protocols, and players that see the prompt alone."""
