"""Analysis of finished runs: re-evaluation, report pages, Pareto fronts over several runs."""
