"""Arms x seeds x label budgets x datasets, as independent tasks: which there are, how they run, what they cost."""
