"""Stages that train, and prepare their data."""
