"""Weights in and out: `imports.py` and `exports.py`, and what the two are made of."""
