"""Statistics of the search: noise between runs, Pareto fronts, Bayesian calibration of a closed form."""
