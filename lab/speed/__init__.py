"""Speed and memory, beside the dense model and other libraries."""
