"""A law of what a dense and a sparse CLIP learn of facts."""
