"""Self-supervised pretraining of Vision Transformers, and the comparison that says whether it paid."""

__version__ = "0.1.0"
