"""Stages that make data."""
