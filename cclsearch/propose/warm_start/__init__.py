"""Knowledge of earlier searches for the next one: the values, how they are learned, and how they are applied."""
