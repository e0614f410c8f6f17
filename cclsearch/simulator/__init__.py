"""A simulated network of a whole cluster: topologies, shared links, collectives, and the steps that run on it."""
