"""A run on disk: frozen inputs, folders, and the lookup of runs by name."""
