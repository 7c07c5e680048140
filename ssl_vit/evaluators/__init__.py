"""Judges of a frozen or fine-tuned backbone; one file = one evaluator, its file name is its name."""
