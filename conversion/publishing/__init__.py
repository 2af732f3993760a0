"""Publishing beside the weights: code that may be trusted, the lineage of a model, its card."""
