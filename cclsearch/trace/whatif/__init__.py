"""Step time with another network, projected from a trace."""
