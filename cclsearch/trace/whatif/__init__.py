"""Step time under another network, projected from a trace."""
