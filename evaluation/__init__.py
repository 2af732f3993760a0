"""Measures, and the commands around them."""
