"""Kineto's JSON (`torch.profiler`): the scanner in C, the parser in Python, and the table of their events."""
