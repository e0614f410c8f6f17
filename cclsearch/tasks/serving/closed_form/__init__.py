"""Throughput, latencies and least memory of servers in closed form, from the space to the surrogate's predictor."""
