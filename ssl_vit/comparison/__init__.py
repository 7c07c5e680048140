"""Arms x seeds x label budgets x data sets, as independent pieces of work: which there are, doing and listing them."""
