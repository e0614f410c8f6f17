"""XLA's planes, from XSpace or from JSON: rows, steps, collectives, and the cost of compiled programs."""
