"""The task `compress`: a fixed number of bytes is compressed; throughput and latency are measured."""
