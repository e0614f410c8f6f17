"""Kineto's JSON (`torch.profiler`): the scanner in C and the parser in Python, and the table of what they read."""
