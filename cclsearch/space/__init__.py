"""The legal set: knobs, constraints, and every configuration that satisfies them, as columns."""
