"""The trace files of one run: finding them, reading them in processes, their cache, and merging their tables."""
