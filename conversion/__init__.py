"""Weights in, weights out, and publishing."""
