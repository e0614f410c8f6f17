"""Workload cards: the model, the batch, the hardware and the framework of a search."""
