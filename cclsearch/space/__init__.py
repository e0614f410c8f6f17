"""Search spaces: knobs, rules, and every configuration that satisfies the rules, as columns."""
