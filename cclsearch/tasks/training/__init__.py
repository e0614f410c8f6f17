"""Training: predicted step time and memory of a configuration."""
