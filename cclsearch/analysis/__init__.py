"""What is computed from finished runs: re-evaluation, report pages, Pareto fronts over several runs."""
