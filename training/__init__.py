"""Recipes, their stages, and one training loop."""
