"""What is published beside the weights: the code that may be trusted, how a model came to be, its card."""
