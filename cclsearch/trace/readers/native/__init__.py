"""The scanner in C: its source, how it is compiled, and the compiled library if there was a compiler."""
