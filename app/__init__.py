"""A page in the browser on which to try a model."""
