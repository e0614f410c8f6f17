"""Answers of `ccl-search score`: text and data, trees of operators, differences of two traces."""
