"""Measured links: a matrix of bandwidth and latency between ranks or nodes, and what groups of ranks get from it."""
