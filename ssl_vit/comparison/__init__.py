"""Arms x seeds x label budgets x data sets, as independent tasks: which there are, how they run, what they cost."""
