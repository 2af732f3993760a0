"""Public benchmarks by name: what they are, how their data lie, and where their class names come from."""
