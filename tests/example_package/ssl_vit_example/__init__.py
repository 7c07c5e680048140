"""An objective, an evaluator and a data source for ssl_vit from another package."""
